"""Compiles the launcher of `lln.kernels.launching.compiled_launcher`: ``lln build-launcher``."""

from __future__ import annotations

import platform
import subprocess
import sysconfig
from pathlib import Path

import torch

from lln.cpu.building import find_compiler, first_error
from lln.errors import BackendUnavailableError
from lln.kernels.launching import compiled_launcher
from lln.kernels.launching.build_folder import put_in_place

# Newer versions of torch need the first, older compilers know only the second.
_STANDARDS = ("-std=c++20", "-std=c++17")
_LIBRARIES = ("torch_python", "torch", "torch_cpu", "c10")


def build(options: tuple[str, ...] = ()) -> Path:
    """Compile the launcher for this Python and this torch.

    Args:
        options: More options for the compiler.

    Returns:
        The library.

    Raises:
        BackendUnavailableError: With the reason, and what to do about it.
    """
    if platform.system() != "Linux":
        raise BackendUnavailableError(
            f"the compiled launcher is for GPUs of NVIDIA under Linux, not for {platform.system()}."
        )
    return put_in_place(compiled_launcher.library(), lambda made: _compile(made, options))


def _compile(target: Path, options: tuple[str, ...]) -> None:
    compiler, source = find_compiler(), compiled_launcher.SOURCE
    if compiler is None:
        raise BackendUnavailableError(
            "no C++ compiler found; install g++ (Debian and Ubuntu: apt install g++), or set CXX."
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise BackendUnavailableError(
            f"Python.h is not in {headers}; install the headers of this Python (Debian and Ubuntu: "
            "apt install python3-dev)."
        )
    home = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    words = [compiler, *compiled_launcher.OPTIONS, *options, f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    words += [f"-I{home / 'include'}", f"-I{headers}", f"-L{home / 'lib'}"]
    words += [str(source), "-o", str(target), *(f"-l{name}" for name in _LIBRARIES)]
    reason = ""
    for standard in _STANDARDS:
        done = subprocess.run(
            [*words, standard], capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode == 0:
            return
        reason = reason or first_error(done.stderr)
    raise BackendUnavailableError(
        f"{compiler} cannot compile {source.name} against torch {torch.__version__}: {reason}"
    )
