"""The table of DESIGN.md: the ways to compute a call, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lln.functional.ways import WAYS
from lln_lab.markdown import Section, table

PAGE = Path("DESIGN.md")
HEADS = ("way", "`impl`", "calls", "what it computes")


def sections() -> Iterator[Section]:
    """The list, as the library has it."""
    lines = [
        [
            way.name,
            f'`"{way.impl}"`' if way.is_whole else "`auto` only",
            ", ".join(f"`{kind}`" for kind in way.kinds),
            (type(way).__doc__ or "").splitlines()[0].rstrip("."),
        ]
        for way in WAYS
    ]
    yield Section(PAGE, "ways", table(HEADS, lines))


def draw() -> None:
    """No pictures."""
