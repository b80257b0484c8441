"""The machine that numbers come from: its processor, and the libraries torch computes with.

Sums are added up in another order on another processor, and libraries differ in what they refuse:
a result or a failure means something only together with these.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

import torch


def facts() -> dict[str, str]:
    """What to say of this machine, by the word to put before it."""
    cores = os.cpu_count() or 1
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "processor": f"{processor()}, {platform.machine()}, {_count(cores, 'core')}, {capability}",
        "torch": f"{torch.__version__}, {_count(torch.get_num_threads(), 'CPU thread')}",
        "math": math_libraries(torch.__config__.show()),
    }


def processor() -> str:
    """The processor's name where the system tells it."""
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


def output_of(*command: str, folder: Path | None = None) -> str:
    """What a program prints; nothing where it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
