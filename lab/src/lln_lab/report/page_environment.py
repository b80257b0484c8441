"""What the numbers of a page depend on."""

from __future__ import annotations

import os
import platform
from datetime import datetime

import torch


def read_environment() -> dict[str, str]:
    """What the numbers depend on, as pages list it."""
    from lln import __version__

    cores = os.cpu_count() or 1
    environment = {
        "lln": __version__,
        "PyTorch": torch.__version__,
        "threads": f"{torch.get_num_threads()} on {cores} CPUs",
        "Python": platform.python_version(),
        "system": f"{platform.system()}, {platform.machine()}",
        "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    }
    if hasattr(os, "getloadavg"):
        environment["load at start"] = f"{os.getloadavg()[0]:.1f}"
    return environment
