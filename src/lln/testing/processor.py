"""What results depend on: the device, the processor, torch's math libraries, the commit.

Other processors add in another order, and libraries refuse different inputs. So every result or
failure is stored together with these facts.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from lln.errors import InvalidInputError

PACKAGE = Path(__file__).resolve().parents[1]


def check_device(device: str | None) -> str:
    """The device to use: the one asked for, else the GPU if there is one.

    Raises:
        InvalidInputError: If it is unknown or not available.
    """
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise InvalidInputError(f"--device must be cpu or cuda, got {device!r}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError("--device cuda needs a CUDA device; use --device cpu.")
    return device


def facts() -> dict[str, str]:
    """Facts about this machine, by their label."""
    cores = os.cpu_count() or 1
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "processor": f"{processor()}, {platform.machine()}, {_count(cores, 'core')}, {capability}",
        "torch": f"{torch.__version__}, {_count(torch.get_num_threads(), 'CPU thread')}",
        "math": math_libraries(torch.__config__.show()),
    }


def processor() -> str:
    """The processor's name, if the system reports it."""
    listing = output_of("lscpu")
    fields = dict(line.split(":", 1) for line in listing.splitlines() if ":" in line)
    name = fields.get("Model name", "").strip().strip("-")
    return name or f"{platform.machine()} CPU"


def math_libraries(configuration: str) -> str:
    """The libraries of matrix products and decompositions, as torch's configuration names them."""
    found = []
    for label, pattern in (
        ("BLAS", r"BLAS_INFO=(\w+)"),
        ("LAPACK", r"LAPACK_INFO=(\w+)"),
        ("oneMKL", r"Math Kernel Library Version ([\w.]+)"),
        ("oneDNN", r"MKL-DNN v([\w.]+)"),
    ):
        match = re.search(rf"(?<!\w){pattern}", configuration)
        if match:
            found.append(f"{label} {match[1]}")
    return ", ".join(found) or "unknown"


def version(package: str) -> str | None:
    """The version of an installed package; None if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The commit of the checkout that this package is used from; empty for an installed one."""
    # Checked first, because an installed copy may lie inside another project's checkout.
    if not output_of("git", "ls-files", "--", str(PACKAGE / "__init__.py")):
        return ""
    return output_of("git", "rev-parse", "--verify", "HEAD")


def uncommitted(*places: str) -> bool | None:
    """Whether files there differ from the commit; None if no checkout says so.

    Args:
        places: Folders, or git's patterns; nothing = the package.
    """
    if not commit():
        return None
    found = output_of("git", "status", "--porcelain", "--", *(places or (str(PACKAGE),)))
    return bool(found)


def output_of(*command: str) -> str:
    """What a program prints when run in the package's folder; empty if missing or failing."""
    try:
        done = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
