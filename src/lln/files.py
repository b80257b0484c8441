"""Files: read as text, looked at before the work begins, and never left half written."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from lln.errors import InvalidInputError, LLNError, WriteError

_KINDS = (
    (stat.S_ISDIR, "folder"),
    (stat.S_ISFIFO, "pipe"),
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
)

# How safetensors, written in Rust, and torch, written in C++, tell of the disk.
_NUMBERED = re.compile(r"\(os error (\d+)\)|Os \{ code: (\d+)")
_TORCH = re.compile(r"PytorchStreamWriter failed|iostream error|inline_container\.cc")


def check_file(path: Path, name: str) -> None:
    """Refuse a place where a file could not be written, before there is anything to write.

    Args:
        path: Of the file to be.
        name: What it was given as, such as ``--out``.

    Raises:
        InvalidInputError: One sentence.
    """
    kind = _kind(path)
    if kind:
        raise InvalidInputError(
            f"{name} must name a file, got the {kind} {str(path)!r}; name a new file."
        )
    _probe(path, path.parent, name)


def check_folder(path: Path, name: str) -> None:
    """Likewise for a folder, which may be there already."""
    if path.exists() and not path.is_dir():
        raise InvalidInputError(
            f"{name} must name a folder, got the {_kind(path) or 'file'} {str(path)!r}; name a new "
            "folder."
        )
    _probe(path, path, name)


def check_free(target: Path, overwrite: bool, name: str) -> None:
    """Refuse a folder to be that cannot be made, or takes a place that is not to be given up.

    Args:
        target: Where the folder is to be.
        overwrite: Whether it may replace a checkpoint folder.
        name: What it was given as.
    """
    if not target.exists():
        _probe(target, target.parent, name)
        return
    if not overwrite:
        raise InvalidInputError(f"{str(target)!r} exists; pass --overwrite to replace it.")
    check_folder(target.resolve().parent, name)
    ours = target.is_dir() and ((target / "config.json").is_file() or not any(target.iterdir()))
    if not ours:
        raise InvalidInputError(
            f"--overwrite replaces checkpoint folders, and {str(target)!r} is none; name another "
            "folder, or remove it yourself."
        )


def check_apart(kept: Path, written: Path, name: str, why: str) -> None:
    """Refuse to write where something is kept: the same folder, one around it or inside it.

    Args:
        kept: Must not change.
        written: Will; links are followed.
        name: What it was given as.
        why: What is said of the folder that is kept.
    """
    one, other = kept.resolve(), written.resolve()
    if one == other:
        where = "the same folder as"
    elif one in other.parents:
        where = "inside"
    elif other in one.parents:
        where = "around"
    else:
        return
    raise InvalidInputError(
        f"{name} {str(written)!r} is {where} {str(kept)!r}, which {why}; name a folder beside it."
    )


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one step, so that a reader or an interrupt never sees half of it."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def compact_json(content: object) -> str:
    """JSON that people read too: indented, with every list of plain values on one line.

    Example:
        >>> print(compact_json({"a": [1, 2.5], "b": "é"}), end="")
        {
          "a": [1, 2.5],
          "b": "é"
        }
    """
    text = json.dumps(content, indent=2, ensure_ascii=False)
    lists = re.compile(r"\[[^\[\]{}]*\]")
    return lists.sub(lambda found: f"[{' '.join(found[0][1:-1].split())}]", text) + "\n"


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes its place in one step when it is complete.

    What is no regular file (a device, a pipe) is refused: it would be replaced by one.

    Args:
        path: Its place; folders are made, and a link goes on pointing to it.

    Raises:
        InvalidInputError: If something else than a file is there.
        WriteError: If the disk is full, or cannot be written; the place is then as it was.
    """
    kind = _kind(path)
    if kind:
        raise InvalidInputError(f"{str(path)!r} is a {kind}, not a file; name a new file.")
    path = Path(os.path.realpath(path))
    with writing(path, "what was there is as it was"):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
            # mkstemp makes private files; results are there to be shown.
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


@contextmanager
def new_folder(target: Path, overwrite: bool, name: str) -> Iterator[Path]:
    """A folder that appears under its name only when it is complete; see `check_free`."""
    check_free(target, overwrite, name)
    # A link goes on pointing to it.
    place = Path(os.path.realpath(target))
    with writing(target, "nothing was left there, and what was there is as it was"):
        place.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
        new, old = work / "new", work / "old"
        try:
            new.mkdir()
            yield new
            if place.exists():
                place.rename(old)
            try:
                new.rename(place)
            except BaseException:
                if old.exists():
                    old.rename(place)
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def writing(path: Path, kept: str) -> Iterator[None]:
    """Tell of a disk that takes no more in one sentence.

    Args:
        path: What the body writes.
        kept: What an attempt that fails leaves behind.
    """
    try:
        yield
    except LLNError:
        raise
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise WriteError(
            f"{str(path)!r} cannot be written: {reason}; {kept}: make room there or name another "
            "place, and run it again."
        ) from error


def _kind(path: Path) -> str:
    """What is there if it is no regular file, links followed."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return ""
    return next((kind for test, kind in _KINDS if test(mode)), "")


def _probe(path: Path, folder: Path, name: str) -> None:
    """Make a file for a moment where a folder is or will be: rights alone do not say enough."""
    folder = folder.absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidInputError(
            f"{name} {str(path)!r} cannot be written: {error.strerror or error}."
        ) from error


def _reason(error: BaseException | None) -> str | None:
    """What the disk said, wherever in the chain of errors; None if it said nothing."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return os.strerror(error.errno)
        numbered = _NUMBERED.search(str(error))
        if numbered:
            return os.strerror(int(numbered[1] or numbered[2]))
        if _TORCH.search(str(error)) and not isinstance(error.__context__, OSError):
            return "the disk took only a part of it"
        error = error.__cause__ or error.__context__
    return None


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
