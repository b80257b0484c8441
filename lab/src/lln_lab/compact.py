"""JSON that people read too."""

from __future__ import annotations

import json
import re


def compact_json(content: object) -> str:
    """JSON that people read too: indented, with every list of plain values on one line.

    Example:
        >>> print(compact_json({"a": [1, 2.5], "b": "é"}), end="")
        {
          "a": [1, 2.5],
          "b": "é"
        }
    """
    text = json.dumps(content, indent=2, ensure_ascii=False)
    lists = re.compile(r"\[[^\[\]{}]*\]")
    return lists.sub(lambda found: f"[{' '.join(found[0][1:-1].split())}]", text) + "\n"
