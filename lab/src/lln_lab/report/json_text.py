"""Numbers of a page as JSON that a person can read."""

from __future__ import annotations

import json
import math
import re


def json_text(content: object, digits: int = 17) -> str:
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
