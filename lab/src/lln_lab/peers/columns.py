"""A table as text in columns, some of which are folded so that all fit into a width."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from itertools import zip_longest

GAP = "  "
# A term of a complexity, brackets in brackets included.
_TERM = re.compile(r"O\((?:[^()]|\([^()]*\))*\)")
# What a line is not broken at, unlike at a space.
_HARD_SPACE = "\N{NO-BREAK SPACE}"


def in_columns(
    heads: Sequence[str], lines: Sequence[Sequence[str]], *, folded: Mapping[str, int], width: int
) -> tuple[list[str], list[str]]:
    """Lay a table out; the last column is one of numbers and ends at the right.

    Args:
        heads: Headings; a hyphen is a place to break one.
        lines: Cells.
        folded: Headings of the columns that give way, the first of them first, each with what
            it is not made narrower than.
        width: Characters a line may have.

    Returns:
        Lines of the heading, and of all below it.

    Example:
        >>> lines = [["relu", "O(N d²); O(N² d) with dense=True", "1.0"]]
        >>> top, rest = in_columns(["name", "time", "size"], lines, folded={"time": 16}, width=30)
        >>> for line in (*top, *rest):
        ...     print(line)
        name  time              size
        relu  O(N d²); O(N² d)   1.0
              with dense=True
    """
    parts = [head.replace("-", "-\n").split("\n") for head in heads]
    columns = list(zip(*lines, strict=True))
    widths = [max(map(len, (*part, *column))) for part, column in zip(parts, columns, strict=True)]
    for head, narrowest in folded.items():
        at = list(heads).index(head)
        others = sum(widths) - widths[at] + len(GAP) * (len(widths) - 1)
        widths[at] = min(widths[at], max(width - others, narrowest))
    tallest = max(map(len, parts))
    above = [[""] * (tallest - len(part)) + part for part in parts]
    below = [
        text
        for line in lines
        for text in _row(
            [
                _fold(cell, size) if head in folded else [cell]
                for head, cell, size in zip(heads, line, widths, strict=True)
            ],
            widths,
        )
    ]
    return _row(above, widths), below


def _fold(text: str, width: int) -> list[str]:
    """Lines of a cell, broken inside a term only where the term is longer than a line."""

    def keep(term: re.Match[str]) -> str:
        return term[0].replace(" ", _HARD_SPACE) if len(term[0]) < width else term[0]

    lines = textwrap.wrap(_TERM.sub(keep, text), width, break_long_words=False)
    return [line.replace(_HARD_SPACE, " ") for line in lines]


def _row(cells: list[list[str]], widths: list[int]) -> list[str]:
    """The lines of one row of cells, each of them a list of lines."""
    return [
        GAP.join(
            [f"{text:<{size}}" for text, size in zip(line[:-1], widths[:-1], strict=True)]
            + [f"{line[-1]:>{widths[-1]}}"]
        ).rstrip()
        for line in zip_longest(*cells, fillvalue="")
    ]
