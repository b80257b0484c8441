"""How objects that hold tensors print: by their shapes, not by thousands of numbers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def brief(owner: object, parts: Mapping[str, object]) -> str:
    """One line for ``repr``: every part by name, tensors by type, shape and device.

    Example:
        >>> import torch
        >>> brief([], {"mass": torch.ones(2, 3), "beta": 2.0})
        'list(mass=float32[2, 3], beta=2.0)'
    """
    return f"{type(owner).__name__}({', '.join(f'{n}={_shown(p)}' for n, p in parts.items())})"


def _shown(part: object) -> str:
    if isinstance(part, Mapping):
        return "{" + ", ".join(f"{name!r}: {_shown(one)}" for name, one in part.items()) + "}"
    if not isinstance(part, Tensor):
        return repr(part)
    kind = str(part.dtype).removeprefix("torch.")
    # Nested tensors do not tell their shape.
    shape = "[nested]" if part.is_nested else str(list(part.shape))
    place = "" if part.device.type == "cpu" else f" on {part.device}"
    return f"{kind}{shape}{place}"
