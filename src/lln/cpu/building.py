"""Compiles the passes: when lln is installed (``hatch_build.py``), and for the tests.

The standard library alone: an installation begins without torch. One library holds the passes for
every instruction set of a processor family, and says which of them the processor at hand knows.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).with_name("cpp")
# Where an installation has it, if it was compiled.
LIBRARY = Path(__file__).with_name("_passes.so")

_COMPILERS = ("c++", "g++", "clang++")
_OPTIONS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fopenmp")
_OPTIONS += ("-fno-math-errno", "-fno-trapping-math", "-w")
# What may be used, and which processor is not kept waiting: some sums are then rounded otherwise,
# so this, too, is the same wherever a library is made.
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512cd")
_AVX2 = ("-mavx2", "-mfma", "-mbmi", "-mbmi2")
_INSTRUCTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "sse2": (),
        "avx2": (*_AVX2, "-mtune=haswell"),
        "avx512": (*_AVX512, *_AVX2, "-mtune=skylake-avx512"),
    },
    "aarch64": {"neon": ("-mtune=neoverse-n1",)},
}


class BuildError(RuntimeError):
    """Why there is no library; everything runs without it."""


def instruction_sets() -> dict[str, tuple[str, ...]]:
    """The instruction sets of this family of processors, and what a compiler is told for each.

    Raises:
        BuildError: If the passes are not for this system.
    """
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    if platform.system() != "Linux" or machine not in _INSTRUCTIONS:
        raise BuildError(
            "the compiled passes are for Linux on x86-64 and ARM, not for "
            f"{platform.system()} on {machine}"
        )
    return _INSTRUCTIONS[machine]


def fingerprint() -> str:
    """What the library of these sources carries; one made of others carries another."""
    digest = hashlib.sha256(repr((_OPTIONS, instruction_sets())).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def find_compiler() -> str | None:
    """The C++ compiler: ``$CXX``, or the first of the usual ones that is installed."""
    given = os.environ.get("CXX")
    return shutil.which(given) if given else next(filter(None, map(shutil.which, _COMPILERS)), None)


def build(target: Path = LIBRARY, options: Sequence[str] = ()) -> Path:
    """Compile the library, unless the file is it already; returns the file.

    The old one stays if there is no new one.

    Raises:
        BuildError: With the reason.
    """
    if not options and target.exists() and fingerprint().encode() in target.read_bytes():
        return target
    sets, compiler = instruction_sets(), find_compiler()
    if compiler is None:
        raise BuildError(
            "no C++ compiler found; install g++ (Debian and Ubuntu: apt install g++), or set CXX"
        )
    # Next to the target, because a file is moved in one step within a file system only.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        made, words = Path(folder, target.name), [compiler, *_OPTIONS, *options, "-c"]
        units = {
            name: [*words, *own, f"-DLLN_SET={name}", str(SOURCES / "passes.cpp")]
            for name, own in sets.items()
        }
        carried = f'-DLLN_SOURCES="{fingerprint()}"'
        units["library"] = [*words, carried, str(SOURCES / "library.cpp")]
        objects = [str(Path(folder, f"{name}.o")) for name in units]
        _run_all([[*unit, "-o", path] for unit, path in zip(units.values(), objects, strict=True)])
        # Without OpenMP: PyTorch has its own, and two of them would not share their threads.
        _run_all([[compiler, "-shared", "-s", *objects, "-o", str(made)]])
        made.chmod(0o755)
        os.replace(made, target)
    return target


def _run_all(commands: Sequence[list[str]]) -> None:
    """Run compilers side by side.

    Raises:
        BuildError: With what the first of them that fails complains of first.
    """
    running = [
        subprocess.Popen(words, stderr=subprocess.PIPE, text=True, errors="replace")
        for words in commands
    ]
    complaints = [process.communicate()[1] for process in running]
    for words, process, complaint in zip(commands, running, complaints, strict=True):
        if process.returncode != 0:
            raise BuildError(f"{words[0]} fails: {first_error(complaint)}; g++ 10 can")


def first_error(complaint: str) -> str:
    """The first line that tells of an error in what a compiler writes."""
    lines = complaint.splitlines()
    return ([line for line in lines if "error" in line] or lines or ["no message"])[0]


def platform_tag(library: Path = LIBRARY) -> str:
    """On which systems a library can be opened, in the words of wheels."""
    versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())
    if not versions:
        return f"linux_{platform.machine()}"
    major, minor = max((int(major), int(minor)) for major, minor in versions)
    return f"manylinux_{major}_{minor}_{platform.machine()}"
