"""What a result must carry to mean something: device, versions, commit, command."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

import lln

ROOT = Path(__file__).resolve().parent.parent


def describe(device: str) -> dict[str, object]:
    """The environment of a run."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else _processor()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton") if device.startswith("cuda") else None,
        "lln": lln.__version__,
        "commit": os.environ.get("LLN_COMMIT") or _git("rev-parse", "--verify", "HEAD"),
        "changed": bool(_git("status", "--porcelain", "--", "src", "benchmarks")),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": "python -m " + " ".join(["benchmarks.run", *_words()]),
    }


def _words() -> list[str]:
    """The options, less where the results go: a place on one machine says nothing on another."""
    words = sys.argv[1:]
    if "--out" in words:
        place = words.index("--out")
        words = words[:place] + words[place + 2 :]
    return words


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _processor() -> str:
    """The processor's name where the system tells it."""
    listing = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
    fields = dict(line.split(":", 1) for line in listing.splitlines() if ":" in line)
    name = fields.get("Model name", "").strip().strip("-")
    return name or f"{platform.machine()} CPU"
