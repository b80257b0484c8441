"""The library of compiled passes: opened when a call first needs it, if it fits this installation.

It is compiled when lln is installed (`lln.cpu.building`). Without it, or with ``LLN_CPU=torch``,
PyTorch computes.
"""

from __future__ import annotations

import ctypes
import os
import re
import warnings
from ctypes import c_bool, c_char_p, c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lln.cpu import building

# What Linux knows about the libraries of this program.
_LOADED = Path("/", "proc", "self", "maps")
# Numbers of pointers that they take.
_FUNCTIONS = {"lln_forward": 7, "lln_backward": 9, "lln_match": 4, "lln_keys_forward": 6}
_FUNCTIONS |= {"lln_causal_forward": 8, "lln_causal_backward": 11, "lln_keys_backward": 10}
_FUNCTIONS |= {"lln_pages_forward": 8}


def is_switched_off() -> bool:
    """Whether the user wants PyTorch's own operations."""
    return os.environ.get("LLN_CPU") == "torch"


# None: not looked for yet. Otherwise the functions, or why there are none.
_found: Any = None


def load() -> Any:
    """The functions of the library; None where it is not to be used."""
    global _found
    if _found is None:
        _found = _why_absent() or _open()
    return None if isinstance(_found, str) else _found


def why_not() -> str | None:
    """Why PyTorch computes, in words; None if the compiled passes do."""
    load()
    return _found if isinstance(_found, str) else None


def _why_absent() -> str | None:
    """The same, before the library is opened."""
    if is_switched_off():
        return "LLN_CPU=torch switches the compiled passes off"
    try:
        building.instruction_sets()
    except building.BuildError as error:
        return str(error)
    if building.LIBRARY.exists():
        return None
    first = ""
    if building.find_compiler() is None:
        first = "install a C++ compiler (Debian and Ubuntu: apt install g++), then "
    return f"lln was installed without them; {first}{how_to_build()}"


def how_to_build() -> str:
    """The command that compiles the passes of this installation."""
    is_checkout = (building.LIBRARY.parents[3] / "hatch_build.py").exists()
    what = "-e ." if is_checkout else "--force-reinstall --no-deps --no-binary lln lln"
    return f"`pip install {what}` compiles them"


def _open() -> Any:
    try:
        return open_library(building.LIBRARY)
    except (OSError, AttributeError) as error:
        reason = f"{building.LIBRARY} cannot be used ({error}); {how_to_build()} again"
    warnings.warn(
        f"lln computes with PyTorch's operations, which take longer: {reason}, LLN_CPU=torch does "
        "without them.",
        stacklevel=2,
    )
    return reason


def open_library(path: Path, instructions: str | None = None) -> Any:
    """The functions of a library, on PyTorch's threads.

    Args:
        path: Of the library.
        instructions: Which instruction set they may use; None = the best of this processor.

    Raises:
        OSError: If it cannot be opened, or was made of other sources.
    """
    ctypes.CDLL(_openmp(), mode=ctypes.RTLD_GLOBAL)
    found = ctypes.CDLL(str(path))
    for name in ("lln_sources", "lln_instructions"):
        getattr(found, name).restype = c_char_p
    if found.lln_sources().decode() != building.fingerprint():
        raise OSError("its sources have changed since it was compiled")
    own = instructions or found.lln_instructions().decode()
    functions = {name: getattr(found, f"{name}_{own}") for name in _FUNCTIONS}
    for name, function in functions.items():
        function.argtypes, function.restype = [c_void_p] * _FUNCTIONS[name], c_bool
    return SimpleNamespace(**functions, instructions=own)


def _openmp() -> str:
    """The OpenMP library that PyTorch uses."""
    for line in _LOADED.read_text("utf-8", "replace").splitlines():
        path = line.split(maxsplit=5)[-1]
        if re.fullmatch(r"lib(gomp|iomp5|omp)\b.*", Path(path).name):
            return path
    raise OSError("PyTorch has loaded no OpenMP library")
