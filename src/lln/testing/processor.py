"""What results depend on: the processor, torch's math libraries.

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

PACKAGE = Path(__file__).resolve().parents[1]


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


def output_of(*command: str) -> str:
    """What a program prints when run in the package's folder; empty if missing or failing."""
    try:
        done = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
