"""Markdown: tables, and pages with sections that programs write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lln.errors import InvalidInputError
from lln.files import write_atomically

# Every table that no page of the documentation shows.
TABLES = Path("lab/results/tables.md")


def table(heads: Sequence[str], lines: Iterable[Sequence[str]], caption: str = "") -> str:
    """Headings, cells and, below, a caption."""
    rows = [f"| {' | '.join(line)} |" for line in (heads, *lines)]
    rows.insert(1, "|" + "---|" * len(heads))
    return "\n".join([*rows, "", caption] if caption else rows)


def source(environment: dict[str, Any]) -> str:
    """What made the results, and from which commit."""
    launcher = " with the compiled launcher" if environment.get("launcher") == "compiled" else ""
    return f"made by `{environment['command']}`{launcher}, {commit_of(environment)}"


def commit_of(environment: dict[str, Any]) -> str:
    """The commit, and whether that is really what ran."""
    changed = environment.get("changed")
    said = ", with uncommitted changes in src" if changed else ""
    said = ", changes in src not recorded" if changed is None else said
    return f"commit `{environment['commit'][:10]}`{said}"


def commits_of(environments: Sequence[dict[str, Any]], what: str = "cells") -> str:
    """The commits of several measurements, and how many did not run exactly those."""
    commits = ", ".join(sorted({one["commit"][:10] for one in environments}))
    total, states = len(environments), [one.get("changed") for one in environments]
    changed, unknown = states.count(True), states.count(None)
    said = f"commit {commits}; {changed} of {total} {what} from a tree with uncommitted changes"
    return f"{said} in src" + (f", not recorded for {unknown}" if unknown else "")


class Section(NamedTuple):
    """A part of a page that a program writes.

    Attributes:
        page: The Markdown file, from the top of the checkout.
        name: That of its marks, ``<!-- name: begin -->`` and ``<!-- name: end -->``.
        text: What belongs between them.
    """

    page: Path
    name: str
    text: str


def fill(sections: Iterable[Section]) -> None:
    """Put sections between their marks, on lines of their own if the marks are."""
    pages: dict[Path, str] = {}
    for page, name, text in sections:
        content = pages[page] if page in pages else page.read_text("utf-8")
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if (count := content.count(begin)) != 1:
            raise InvalidInputError(f"{page} needs {begin} once, has it {count} times.")
        before, rest = content.split(begin)
        inside, after = rest.split(end)
        edge = "\n" if inside.startswith("\n") else ""
        pages[page] = f"{before}{begin}{edge}{text}{edge}{end}{after}"
    for page, content in pages.items():
        write_atomically(page, content)
