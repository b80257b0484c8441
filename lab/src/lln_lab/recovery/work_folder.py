"""The folder that recovery training resumes from: one run at a time, whole checkpoints only."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lln.errors import InvalidInputError
from lln.files import writing

_LOCK = ".lock"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_TAKEN = (errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK, errno.EDEADLK)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep the folder to this process; the system gives it back however the process ends.

    Under ``torchrun`` the first process holds it for all.

    Raises:
        InvalidInputError: If another process trains there.
    """
    if not _is_first():
        yield
        return
    with writing(folder, "nothing was trained"):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock(handle, folder)
        yield
    finally:
        # Closing unlocks. The file stays: whoever waits for its name could not see a new one.
        os.close(handle)


def check_unlocked(folder: Path) -> None:
    """Refuse a folder that another process trains in, before anything is loaded."""
    if (folder / _LOCK).is_file():
        with locked(folder):
            pass


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end."""
    if not folder.is_dir():
        return None
    found = [path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name)]
    found.sort(key=lambda path: int(path.name.split("-")[1]), reverse=True)
    return next((path for path in found if _is_complete(path)), None)


@contextmanager
def saving(checkpoint: Path) -> Iterator[None]:
    """Around the writing of a checkpoint: one that could not be finished is removed."""
    try:
        with writing(checkpoint, "the checkpoint before it is kept, where training goes on"):
            yield
    except BaseException:
        if _is_first() and checkpoint.is_dir() and not _is_complete(checkpoint):
            shutil.rmtree(checkpoint, ignore_errors=True)
        raise


def _is_first() -> bool:
    """Whether this is the only process, or the first of those that ``torchrun`` started."""
    return int(os.environ.get("RANK", "0")) == 0


def _is_complete(checkpoint: Path) -> bool:
    """Whether the file that ``Trainer`` writes last is there and whole."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return True


def _lock(handle: int, folder: Path) -> None:
    try:
        try:
            import fcntl
        except ImportError:  # Windows has another call for the same thing.
            import msvcrt

            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise InvalidInputError(
                f"the folder {str(folder)!r} cannot be locked ({error.strerror}), so that two "
                "runs could mix their checkpoints there; choose a folder on another disk."
            ) from error
        raise InvalidInputError(
            f"another run trains in {str(folder)!r}; wait until it ends, or start anew in another "
            "folder."
        ) from error
