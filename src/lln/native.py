"""Libraries that are compiled on the user's machine: where they are kept, and how they get there.

Nothing is compiled unless the user asks for it (``lln build-launcher``, ``lln build-cpu``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from lln.errors import BackendUnavailableError

_COMPILERS = ("c++", "g++", "clang++")


def cache_folder() -> Path:
    """``LLN_BUILD_FOLDER``, or the folder ``lln`` of the user's cache."""
    given = os.environ.get("LLN_BUILD_FOLDER")
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "lln"


def find_compiler() -> str | None:
    """The C++ compiler: ``$CXX``, or the first of the usual ones that is installed."""
    given = os.environ.get("CXX")
    return shutil.which(given) if given else next(filter(None, map(shutil.which, _COMPILERS)), None)


def need_compiler() -> str:
    """The same.

    Raises:
        BackendUnavailableError: If there is none.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BackendUnavailableError(
            "no C++ compiler found; install g++ (Debian and Ubuntu: apt install g++), or set CXX."
        )
    return compiler


def compile_with(words: Sequence[str]) -> str | None:
    """Run a compiler; what it complains of first, None if it succeeds."""
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0:
        return None
    lines = done.stderr.splitlines()
    errors = [line for line in lines if "error" in line]
    return (errors or lines or ["no message"])[0]


def put_in_place(target: Path, make: Callable[[Path], None]) -> Path:
    """Make a library next to its place and move it there.

    Args:
        target: Its place.
        make: Writes the library into the file that it gets.

    Returns:
        The target.

    Raises:
        BackendUnavailableError: If nothing can be written there.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
            made = Path(folder) / target.name
            make(made)
            # Whoever loads it meanwhile has the old one or the new one, never half of it.
            os.replace(made, target)
    except OSError as error:
        raise BackendUnavailableError(
            f"cannot write to {target.parent} ({error.strerror}); set LLN_BUILD_FOLDER to a "
            "folder for compiled libraries."
        ) from error
    return target
