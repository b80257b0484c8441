"""The command line's list of attention systems: ``lln peers [NAME]``."""

from __future__ import annotations

from typing import Annotated

import typer

# Columns that text is folded to where the terminal does not decide.
WIDTH = 100


def peers(
    name: Annotated[
        str | None, typer.Argument(help="A system, to see its full card. Default: the table.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Everything as JSON, for programs.")
    ] = False,
) -> None:
    """List the attention systems that LLN is compared with, or show the card of one.

    Columns: kind is core (heads in, heads out), mixer (owns its projections) or block (replaces
    attention and feed-forward). complexity is time in N tokens, d the head width. causal: whether
    there is a form for decoders. row-stochastic: rows of the attention matrix are non-negative and
    sum to 1, so that entropy and spectral gap mean something. parameters: of an encoder of a stated
    size, and relative to softmax's. In any system, appending padded tokens changes no real token.

    Try `lln peers performer`, then in Python:
    `lln.peers.build("performer", embed_dim=256, num_heads=4, max_len=512)`. How fast they are:
    `lln bench peers`.
    """
    from lln.peers import listing

    if as_json:
        import json

        found = listing.data([name] if name and listing.description(name) else None)
        typer.echo(json.dumps(found[0] if name else found, indent=1, ensure_ascii=False))
    elif name:
        typer.echo(_folded(listing.description(name)))
    else:
        _show(*listing.table())
        typer.echo(f"Parameters: {listing.SIZE_IN_WORDS},")
        typer.echo("embeddings left out; × is relative to softmax's.")
        typer.echo("The card of one: lln peers NAME. Speed and memory: lln bench peers.")


def _show(heads: list[str], lines: list[list[str]]) -> None:
    """The table, at most as wide as the terminal; away from one 100 columns or $COLUMNS."""
    import shutil

    from lln.peers.columns import in_columns

    width = shutil.get_terminal_size((WIDTH, 24)).columns
    top, rest = in_columns(heads, lines, folded="complexity", width=width)
    for line in top:
        typer.secho(line, bold=True)
    typer.echo("─" * len(top[-1]))
    typer.echo("\n".join(rest) + "\n")


def _folded(text: str) -> str:
    """Long lines folded to the terminal, continued under their text."""
    import shutil
    import textwrap

    width = min(shutil.get_terminal_size().columns, WIDTH)
    lines: list[str] = []
    for line in text.splitlines():
        indent = " " * (6 if line.startswith("  ") else 16)
        folded = textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        lines += folded or [""]
    return "\n".join(lines)
