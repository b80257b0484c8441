"""Whole texts, read into memory; `lln.checks.reading` reads them piece by piece."""

from __future__ import annotations

from pathlib import Path

from lln.checks.reading import each_line, text_parts


def read_utf8(path: Path, name: str, most: int | None = None) -> str:
    """The text of a file.

    Args:
        path: The file; ``.xz`` and ``.gz`` are decompressed.
        name: The option or argument that gave it, such as ``--text``.
        most: Bytes to read; None = all of them.

    Raises:
        InvalidInputError: As `lln.checks.reading.text_parts`.
    """
    return "".join(text_parts(path, f"{name} {str(path)!r}", most))


def read_lines(path: Path, name: str) -> list[str]:
    """All that `lln.checks.reading.each_line` gives."""
    return list(each_line(path, name))
