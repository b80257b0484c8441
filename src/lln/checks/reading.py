"""Reading files that somebody else may have written: they hold data, and never run code.

Whatever is wrong with a file, it is one sentence that names the file, an `InvalidInputError`.
"""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from io import IncrementalNewlineDecoder
from pathlib import Path
from typing import IO, Any, cast

from lln.checks.schema import fault
from lln.errors import InvalidInputError

# What opening and unpacking a file may raise.
UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)

# Of text, unpacked: a small packed file may hold any amount.
MOST_BYTES = 2_000_000_000
_MOST_JSON = 256_000_000
_CHUNK = 1 << 20
_LONGEST_LINE = 1_000_000
_LONGEST_REASON = 400
_NO_TEXT = "holds no text; name a plain text file"


def read_json(path: Path, schema: Any, what: str, fix: str, most: int = _MOST_JSON) -> Any:
    """The content of a JSON file.

    Args:
        path: The file.
        schema: What it must hold, see `lln.checks.schema`.
        what: What the file should be, such as ``"a report of lln inspect"``.
        fix: What to do if it is not, for the message.
        most: Bytes it may have.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise InvalidInputError(
            f"{str(path)!r} cannot be read: {error.strerror or error}; {fix}."
        ) from error
    refusal = f"{str(path)!r} is not {what}"
    if len(content) > most:
        raise InvalidInputError(f"{refusal} (it has more than {most:,} bytes); {fix}.")
    return parsed_json(content, schema, refusal, fix)


def parsed_json(content: bytes, schema: Any, refusal: str, fix: str) -> Any:
    """The same for content that has been read; ``refusal`` is how the message begins."""
    found, problem = None, None
    try:
        found = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is not UTF-8"
    except RecursionError:
        problem = "it is nested too deeply"
    except ValueError as error:
        problem = str(error)
    problem = problem or fault(found, schema)
    if problem is not None:
        raise InvalidInputError(f"{refusal} ({problem}); {fix}.")
    return found


def first_line(error: BaseException) -> str:
    """What an error of another library says, short enough for a sentence."""
    lines = str(error).split("\n")
    found = [line.strip() for line in lines if line.strip()] or [type(error).__name__]
    # Some only announce in the first line what the second one says.
    said = " ".join(found[:2]) if found[0].endswith(":") else found[0]
    return said[:_LONGEST_REASON].rstrip(".:")


def each_line(path: Path, name: str) -> Iterator[str]:
    """The non-empty lines of a text file, or of all text files in a folder, read as they are taken.

    A line without end is cut after about a million characters.

    Args:
        path: A file, or a folder with ``.txt`` or compressed ``.txt.xz`` files.
        name: The option or argument that gave it.

    Raises:
        InvalidInputError: As `text_parts`, once the lines before have been taken.
    """
    files = [path]
    if path.is_dir():
        files = sorted([*path.rglob("*.txt"), *path.rglob("*.txt.xz")])
    if not files or not all(file.is_file() for file in files):
        raise InvalidInputError(
            f"{name} {str(path)!r} is neither a text file nor a folder with .txt or .txt.xz files."
        )
    for file in files:
        for line in _split(text_parts(file, f"{name} {str(file)!r}")):
            if stripped := line.strip():
                yield stripped


def open_unpacked(path: Path) -> IO[bytes]:
    """A file opened for reading bytes, decompressed if its name ends in ``.xz`` or ``.gz``."""
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    return path.open("rb")


def text_parts(path: Path, given: str, most: int | None = None) -> Iterator[str]:
    """The text of a file in pieces, read as they are taken.

    Args:
        path: The file; ``.xz`` and ``.gz`` are decompressed.
        given: How the message begins: who gave the file, and its name.
        most: Bytes to read; None = all of them.

    Raises:
        InvalidInputError: One sentence if it cannot be read, is not text in UTF-8, or unpacks to
            more than `MOST_BYTES`.
    """
    limit = MOST_BYTES if most is None else most
    rest, done, line, begin = b"", 0, 1, None
    try:
        with open_unpacked(path) as file:
            while True:
                chunk = file.read(min(_CHUNK, limit - done - len(rest)))
                content = rest + chunk
                begin = content[:2] if begin is None else begin
                try:
                    text, rest = content.decode("utf-8"), b""
                except UnicodeDecodeError as error:
                    # Reading ``most`` bytes may cut the last character; that is not an error in
                    # the file.
                    cut = chunk or done + len(content) == most
                    if error.reason != "unexpected end of data" or not cut:
                        line += content.count(b"\n", 0, error.start)
                        place, byte = done + error.start, content[error.start]
                        raise InvalidInputError(
                            f"{given} {_not_utf8(begin, place, line, byte)}"
                        ) from error
                    text, rest = content[: error.start].decode("utf-8"), content[error.start :]
                if "\0" in text:
                    raise InvalidInputError(f"{given} {_NO_TEXT}.")
                if text:
                    yield text if done else text.removeprefix("\ufeff")
                read = len(content) - len(rest)
                line += content.count(b"\n", 0, read)
                done += read
                if not chunk:
                    break
            if most is None and file.read(1):
                raise InvalidInputError(
                    f"{given} holds more than {limit:,} bytes of text; cut it into several files."
                )
    except UNREADABLE as error:
        raise InvalidInputError(
            f"{given} cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from error


def _split(parts: Iterable[str]) -> Iterator[str]:
    """The lines of a text, whatever ends them; endless ones are cut."""
    newlines = IncrementalNewlineDecoder(None, translate=True)
    rest = ""
    for part in parts:
        *whole, rest = (rest + newlines.decode(part)).split("\n")
        yield from whole
        if len(rest) >= _LONGEST_LINE:
            yield rest
            rest = ""
    yield rest + newlines.decode("", final=True)


def _not_utf8(begin: bytes, place: int, line: int, byte: int) -> str:
    """Where the content stops being UTF-8, and how to convert it."""
    guess = "utf-16" if begin in (b"\xff\xfe", b"\xfe\xff") else "latin1"
    return (
        f"is not UTF-8 text: byte {place} (line {line}) is 0x{byte:02x}; convert it "
        f"first, for example with `iconv -f {guess} -t utf-8 OLD > NEW`."
    )
