"""Bytes as tokens: the id of a byte is its value plus one, because 0 is padding.

These are the ids of Long Range Arena's byte-level tasks; no token marks the start or the end.
"""

from __future__ import annotations

import numpy as np

BYTE_VOCABULARY = 257


def byte_ids(text: str | bytes, most: int | None = None) -> np.ndarray:
    """Token ids of a text, of its first ``most`` bytes: uint16 ``[T]`` with values 1 to 256.

    Example:
        >>> byte_ids("Aé").tolist()
        [66, 196, 170]
    """
    content = text.encode("utf-8") if isinstance(text, str) else text
    return np.frombuffer(content[:most], dtype=np.uint8).astype(np.uint16) + 1
