"""A whole page, and its numbers as JSON."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from datetime import datetime
from importlib import resources

import torch


def style_sheet() -> str:
    """The style of every page."""
    return resources.files("lln.studies.report").joinpath("page.css").read_text("utf-8")


def html_document(title: str, body: str, *, refresh: bool = False) -> str:
    """One self-contained file; with ``refresh`` a page that is still growing keeps up with it."""
    again = '<meta http-equiv="refresh" content="5">' if refresh else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{again}<title>{title}</title><style>\n{style_sheet()}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


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


def json_document(content: object, digits: int = 17) -> str:
    """Readable JSON, a list of numbers on one line.

    Args:
        content: Dictionaries, lists, texts and numbers; NaN and infinity become null.
        digits: Significant digits of numbers; 17 = all.
    """
    text = json.dumps(_plain(content, digits), indent=1, ensure_ascii=False, allow_nan=False)
    return re.sub(r"\[[^\[\]{}\"]*\]", lambda found: _one_line(found[0]), text) + "\n"


def _one_line(numbers: str) -> str:
    return f"[{', '.join(numbers[1:-1].replace(',', ' ').split())}]"


def _plain(value: object, digits: int) -> object:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, digits) for item in value]
    return value
