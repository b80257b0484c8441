"""What a result must carry to mean something: device, versions, commit, command."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import lln
from lln.eager.load import read_load
from lln.errors import InvalidInputError
from lln.studies.processor import output_of, processor

PACKAGE = Path(lln.__file__).resolve().parent

# Measurements made under different values of these do not belong in one table.
IDENTITY = ("device", "threads", "torch", "triton", "commit")


def describe(device: str, command: str, echo: Callable[[str], object]) -> dict[str, Any]:
    """The environment of a run; says so if other programs keep the processors busy.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        command: What to type to make the same measurements again.
        echo: Takes a line meant for the terminal.
    """
    on_gpu = device == "cuda"
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
        "triton": _version("triton") if on_gpu else None,
        "lln": lln.__version__,
        "commit": os.environ.get("LLN_COMMIT") or _commit(),
        "changed": bool(_output("git", "status", "--porcelain", "--", str(PACKAGE))),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": command,
    }


def check_same(stored: dict[str, Any], here: dict[str, Any], path: Path) -> None:
    """Refuse to go on with measurements that were made elsewhere.

    Raises:
        InvalidInputError: Names what differs.
    """
    for name in IDENTITY:
        if stored.get(name) != here[name]:
            raise InvalidInputError(
                f"--resume cannot go on with {path}: its {name} is {stored.get(name)!r}, here it "
                f"is {here[name]!r}; leave --resume out to start anew, or choose another --out."
            )


def check_device(device: str | None) -> str:
    """The device to measure: the one asked for, else the GPU if there is one.

    Raises:
        InvalidInputError: If it is unknown or not here.
    """
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise InvalidInputError(f"--device must be cpu or cuda, got {device!r}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError("--device cuda needs a CUDA device; use --device cpu.")
    return device


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """The commit this file belongs to; empty for an installed package."""
    # An installed copy may lie inside the checkout of some other project.
    if not _output("git", "ls-files", "--", str(PACKAGE / "__init__.py")):
        return ""
    return _output("git", "rev-parse", "--verify", "HEAD")


def _output(*command: str) -> str:
    """What a program prints when it runs in the folder of this package."""
    return output_of(*command, folder=PACKAGE)
