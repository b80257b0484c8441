"""The command line's list of attention systems: ``lln peers [NAME]``."""

from __future__ import annotations

from typing import Annotated

import typer

# Width that text is wrapped to where there is no terminal.
WIDTH = 100
# Columns of the table that may shrink to fit the terminal, and their least width: formulas break
# below it.
FOLDED = {"oracle": 13, "complexity": 16}


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
    attention and feed-forward). complexity is time for N tokens with head width d. causal: whether
    there is a form for decoders. mask: appending padded tokens changes no real token.
    row-stochastic: rows of the attention matrix are non-negative and sum to 1, so that entropy and
    spectral gap are defined. oracle: the library that the tests compare it with, besides its dense
    N×N form. adds: parameters beyond softmax's in an encoder of a stated size.

    Try `lln peers performer`, then in Python:
    `lln_lab.peers.build("performer", embed_dim=256, num_heads=4, max_len=512)`. How fast they are:
    `lln bench peers`.
    """
    from lln_lab.peers import listing

    if as_json:
        import json

        found = listing.data([name] if name and listing.description(name) else None)
        typer.echo(json.dumps(found[0] if name else found, indent=1, ensure_ascii=False))
    elif name:
        typer.echo(_folded(listing.description(name)))
    else:
        heads, lines = listing.table()
        _show(heads, lines, listing.notes())
        typer.echo(
            f"{len(lines)} systems. The card of one: lln peers NAME. Speed and memory: "
            "lln bench peers."
        )


def _show(heads: list[str], lines: list[list[str]], notes: list[str]) -> None:
    """Print the table, at most as wide as the terminal; without one 100 columns or $COLUMNS."""
    import shutil

    from lln_lab.peers.columns import in_columns

    width = shutil.get_terminal_size((WIDTH, 24)).columns
    folded = dict(FOLDED)
    if width < WIDTH:
        # The least important column: every system is also tested against its dense form.
        at = heads.index("oracle")
        heads, lines = _without(heads, at), [_without(line, at) for line in lines]
        folded.pop("oracle")
        notes = [note for note in notes if not note.startswith("oracle")]
        notes.append(f"{WIDTH} columns have room for the oracles too.")
    top, rest = in_columns(heads, lines, folded=folded, width=width)
    for line in top:
        typer.secho(line, bold=True)
    typer.echo("─" * len(top[-1]))
    typer.echo("\n".join(rest) + "\n")
    for note in notes:
        typer.echo(_folded(note, indent=2))


def _without(cells: list[str], at: int) -> list[str]:
    return cells[:at] + cells[at + 1 :]


def _folded(text: str, indent: int = 16) -> str:
    """Long lines wrapped to the terminal, with continuation lines indented."""
    import shutil
    import textwrap

    width = min(shutil.get_terminal_size().columns, WIDTH)
    lines: list[str] = []
    for line in text.splitlines():
        under = " " * (6 if line.startswith("  ") else indent)
        folded = textwrap.wrap(
            line, width, subsequent_indent=under, break_long_words=False, break_on_hyphens=False
        )
        lines += folded or [""]
    return "\n".join(lines)
