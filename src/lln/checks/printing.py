"""How tensors and numbers are written for people: a shape instead of thousands of numbers."""

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
    # Nested tensors have no plain shape.
    shape = "[nested]" if part.is_nested else str(list(part.shape))
    place = "" if part.device.type == "cpu" else f" on {part.device}"
    return f"{kind}{shape}{place}"


def written(value: float, form: str) -> str:
    """A number in the given format, without a sign if it rounds to zero.

    Args:
        value: The number.
        form: A format specification, as `format` takes it.

    Example:
        >>> written(-0.004, ".2f"), written(-0.004, "+.2f"), written(-0.004, "+.3f")
        ('0.00', '0.00', '-0.004')
    """
    text = format(value, form)
    digits = [each for each in text if each.isdigit()]
    return text.lstrip("+-") if digits and set(digits) == {"0"} else text
