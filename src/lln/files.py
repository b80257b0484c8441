"""Writing files: check targets before long work, never leave a file half written."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from lln.errors import InvalidInputError, LLNError, WriteError

_KINDS = (
    (stat.S_ISDIR, "folder"),
    (stat.S_ISFIFO, "pipe"),
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
)

# How safetensors (Rust) and torch (C++) report disk errors in their messages.
_NUMBERED = re.compile(r"\(os error (\d+)\)|Os \{ code: (\d+)")
_TORCH = re.compile(r"PytorchStreamWriter failed|iostream error|inline_container\.cc")


def check_folder(path: Path, name: str) -> None:
    """Refuse a path where no folder could be made or used, before there is anything to write.

    It may already exist; ``name`` is the option or argument that gave it, such as ``--out``.
    """
    if path.exists() and not path.is_dir():
        raise InvalidInputError(
            f"{name} must name a folder, got the {kind_of(path) or 'file'} {str(path)!r}; name a "
            "new folder."
        )
    check_writable(path, path, name)


def check_free(target: Path, overwrite: bool, name: str) -> None:
    """Refuse a new folder that cannot be created, or that would replace what must not be replaced.

    ``overwrite`` lets it replace a checkpoint folder.
    """
    if not target.exists():
        check_writable(target, target.parent, name)
        return
    if not overwrite:
        raise InvalidInputError(f"{str(target)!r} exists; pass --overwrite to replace it.")
    check_folder(target.resolve().parent, name)
    ours = target.is_dir() and ((target / "config.json").is_file() or not any(target.iterdir()))
    if not ours:
        raise InvalidInputError(
            f"--overwrite replaces checkpoint folders, and {str(target)!r} is not one; name "
            "another folder, or remove it yourself."
        )


def check_apart(kept: Path, written: Path, name: str, why: str) -> None:
    """Refuse to write to a folder that must not change, to a parent of it, or inside it.

    Args:
        kept: The folder that must not change.
        written: The folder to write; links are followed.
        name: The option or argument that gave ``written``.
        why: Why ``kept`` must not change, for the message.
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


@contextmanager
def replacing(path: Path, check: Callable[[Path], None] | None = None) -> Iterator[IO[bytes]]:
    """A file to write to, which replaces ``path`` in one step when it is complete.

    A device or a pipe is refused, because it would be replaced by a regular file.

    Args:
        path: Where it goes; missing folders are created, and a link keeps pointing to it.
        check: Gets the complete file under its temporary name; if it raises, nothing is replaced.

    Raises:
        InvalidInputError: If ``path`` exists and is not a regular file.
        WriteError: If the disk is full or not writable; ``path`` is then unchanged.
    """
    kind = kind_of(path)
    if kind:
        raise InvalidInputError(f"{str(path)!r} is a {kind}, not a file; name a new file.")
    path = Path(os.path.realpath(path))
    with writing(path, "any earlier file is unchanged"):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                # After a power cut the name must not stand for content that never reached the disk.
                file.flush()
                os.fsync(file.fileno())
            if check is not None:
                check(Path(temporary))
            # mkstemp makes files that only the owner can read; others should read results too.
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
            _sync_folder(path.parent)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def _sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk, where the system can do that."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def new_folder(target: Path, overwrite: bool, name: str) -> Iterator[Path]:
    """A folder that appears under its name only when it is complete; see `check_free`."""
    check_free(target, overwrite, name)
    # Resolved, so that a link keeps pointing to the folder.
    place = Path(os.path.realpath(target))
    with writing(target, "nothing was left there, and any earlier folder is unchanged"):
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
    """Turn disk errors in the body into one sentence, a `WriteError`.

    Args:
        path: What the body writes.
        kept: What a failed attempt leaves behind, for the message.
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
            f"{str(path)!r} cannot be written: {reason}; {kept}; make room there or name another "
            "place, and run it again."
        ) from error


def kind_of(path: Path) -> str:
    """``"folder"``, ``"pipe"`` and so on; empty for a regular file or nothing. Follows links."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return ""
    return next((kind for test, kind in _KINDS if test(mode)), "")


def check_writable(path: Path, folder: Path, name: str) -> None:
    """Try a temporary file in the folder or its nearest parent: permission bits do not suffice."""
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
    """The disk error anywhere in the chain of exceptions, in words; None if there is none."""
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
