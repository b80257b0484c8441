"""Text files as all commands read them: UTF-8, packed or not."""

from __future__ import annotations

import gzip
import io
import lzma
from pathlib import Path
from typing import IO, cast

from lln.errors import InvalidInputError


def read_utf8(path: Path, name: str, most: int | None = None) -> str:
    """The text of a file.

    Args:
        path: Of the file; ``.xz`` and ``.gz`` are unpacked.
        name: What it was given as, such as ``--text``.
        most: Bytes to read; None = all of them.

    Raises:
        InvalidInputError: One sentence if it cannot be read, or is no text in UTF-8.
    """
    given = f"{name} {str(path)!r}"
    try:
        with open_unpacked(path) as file:
            content = file.read() if most is None else file.read(most)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise InvalidInputError(
            f"{given} cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from error
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        # A character that ends beyond the last byte read is whole in the file.
        if error.reason != "unexpected end of data" or len(content) != most:
            raise InvalidInputError(f"{given} {_not_utf8(content, error.start)}") from error
        text = content[: error.start].decode("utf-8")
    if "\0" in text:
        raise InvalidInputError(f"{given} holds no text; name a plain text file.")
    return text.removeprefix("\ufeff")


def read_lines(path: Path, name: str) -> list[str]:
    """The lines that are not empty of a text file, or of all of them in a folder.

    Args:
        path: A file, or a folder with files that end in ``.txt`` or, packed, ``.txt.xz``.
        name: What it was given as.
    """
    files = [path]
    if path.is_dir():
        files = sorted([*path.rglob("*.txt"), *path.rglob("*.txt.xz")])
    if not files or not all(file.is_file() for file in files):
        raise InvalidInputError(
            f"{name} {str(path)!r} is no text file, nor a folder with .txt or .txt.xz files."
        )
    lines = (line.strip() for file in files for line in io.StringIO(read_utf8(file, name), None))
    return [line for line in lines if line]


def open_unpacked(path: Path) -> IO[bytes]:
    """A file's bytes, unpacked if its name says that they are packed."""
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    return path.open("rb")


def _not_utf8(content: bytes, place: int) -> str:
    """Where it stops to be UTF-8, and what to do."""
    guess = "utf-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "latin1"
    line = content.count(b"\n", 0, place) + 1
    return (
        f"is not UTF-8 text: byte {place} (line {line}) is 0x{content[place]:02x}; convert it "
        f"first, for example with `iconv -f {guess} -t utf-8 OLD > NEW`."
    )
