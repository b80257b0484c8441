"""The command line's list of attention systems: ``lln peers [NAME]``."""

from __future__ import annotations

from typing import Annotated

import typer


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
    there is a form for decoders. padding: "longer" means that appending padded tokens changes no
    real token, "values" that the padded length matters but not what padded tokens hold.
    row-stochastic: rows of the attention matrix are non-negative and sum to 1, so that entropy and
    spectral gap mean something. parameters: of an encoder of a stated size, and relative to
    softmax's.

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
        from lln.bench.display import show_table

        show_table(*listing.table(), title="Attention systems", texts=6)
        typer.echo(f"Parameters: {listing.SIZE_IN_WORDS}; × relative to softmax's.")
        typer.echo("The card of one: lln peers NAME. Speed and memory: lln bench peers.")


def _folded(text: str) -> str:
    """Long lines folded to the terminal, continued under their text."""
    import shutil
    import textwrap

    width = min(shutil.get_terminal_size().columns, 100)
    lines: list[str] = []
    for line in text.splitlines():
        indent = " " * (6 if line.startswith("  ") else 16)
        folded = textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        lines += folded or [""]
    return "\n".join(lines)
