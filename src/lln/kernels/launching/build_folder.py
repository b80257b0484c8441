"""Where libraries are kept that the user has asked to compile, and how they get there."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from lln.errors import BackendUnavailableError


def cache_folder() -> Path:
    """``LLN_BUILD_FOLDER``, or the folder ``lln`` of the user's cache.

    Raises:
        BackendUnavailableError: If it depends on where the program was started, or there is no home
            folder.
    """
    for name, inside in (("LLN_BUILD_FOLDER", ""), ("XDG_CACHE_HOME", "lln")):
        given = os.environ.get(name)
        if given and not os.path.isabs(given):
            raise BackendUnavailableError(f"{name} must be an absolute path, got {given!r}.")
        if given:
            return Path(given) / inside
    try:
        return Path.home() / ".cache" / "lln"
    except RuntimeError as error:
        raise BackendUnavailableError(
            "the home folder cannot be found; set LLN_BUILD_FOLDER to a folder for compiled "
            "libraries."
        ) from error


def is_there(library: Callable[[], Path]) -> bool:
    """Whether a library has been compiled; there is none where nothing can be looked for."""
    try:
        return library().exists()
    except (OSError, BackendUnavailableError):
        return False


def trusted(path: Path) -> Path:
    """Where a file or folder really is, if nobody but this user and root can replace it.

    Raises:
        PermissionError: If it or a folder above it belongs to somebody else or is writable for
            others. In a folder like ``/tmp`` others may write, but not touch what is not theirs.
    """
    real = path.resolve(strict=True)
    for place in (real, *real.parents):
        facts = place.stat()
        if facts.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{place} belongs to another user")
        is_kept = stat.S_ISDIR(facts.st_mode) and facts.st_mode & stat.S_ISVTX
        if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_kept:
            raise PermissionError(f"{place} is writable for other users")
    return real


def put_in_place(target: Path, make: Callable[[Path], None]) -> Path:
    """Write a library into a file next to its place, move it there, and return the place.

    Raises:
        BackendUnavailableError: If nothing can be written there.
    """
    try:
        _make_folder(target.parent)
        trusted(target.parent)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
            made = Path(folder) / target.name
            make(made)
            made.chmod(0o755)
            # Whoever loads it meanwhile has the old one or the new one, never half of it.
            os.replace(made, target)
    except OSError as error:
        raise BackendUnavailableError(
            f"cannot write to {target.parent} ({error.strerror or error}); set LLN_BUILD_FOLDER to "
            "a folder of your own for compiled libraries."
        ) from error
    return target


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, for this user alone."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir(mode=0o700, exist_ok=True)
