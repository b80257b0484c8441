"""The environment stored with every result: device, versions, commit, command."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import lln
from lln.cpu import library
from lln.errors import InvalidInputError
from lln.kernels.launching import compiled_launcher
from lln.testing.processor import processor, version
from lln_lab.bench.load import read_load
from lln_lab.machine import commit, uncommitted

# Measurements with different values of these must not be in one table.
IDENTITY = ("device", "threads", "torch", "triton", "cpu_passes", "launcher", "commit")


def describe(
    device: str, command: str, echo: Callable[[str], object] = lambda _: None
) -> dict[str, Any]:
    """The environment of a run; prints a warning if other programs keep the processors busy.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        command: What to type to repeat the measurements.
        echo: Takes a line meant for the terminal.
    """
    on_gpu = device == "cuda"
    # Whoever names a commit says that these files are a clean copy of it.
    named = os.environ.get("LLN_COMMIT")
    load = read_load()
    if load.warning:
        echo(load.warning)
    return {
        "device": torch.cuda.get_device_name() if on_gpu else processor(),
        "threads": torch.get_num_threads(),
        "cores": load.cores,
        "busy_cores": None if load.busy is None else round(load.busy, 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton") if on_gpu else None,
        "cpu_passes": None if on_gpu else "torch" if library.why_not() else "compiled",
        "launcher": ("python" if compiled_launcher.why_not() else "compiled") if on_gpu else None,
        "lln": lln.__version__,
        "commit": named or commit(),
        "changed": uncommitted() if named in (None, commit()) else False,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": command,
    }


def check_same(stored: dict[str, Any], here: dict[str, Any], path: Path) -> None:
    """Refuse to resume measurements that were made in another environment.

    Args:
        stored: The environment in the file.
        here: Entries that must be equal.
        path: The file.

    Raises:
        InvalidInputError: Names what differs.
    """
    for name, own in here.items():
        if stored.get(name) != own:
            raise InvalidInputError(
                f"--resume cannot continue {path}: its {name} is {stored.get(name)!r}, here it "
                f"is {own!r}; leave --resume out to start over, or choose another --out."
            )
