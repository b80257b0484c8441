"""Which precision the arithmetic runs in, whatever precision the tensors come in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything narrower.

    >>> accumulation_dtype(torch.bfloat16)
    torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as ``scaled_dot_product_attention`` does under autocast: to the autocast dtype.

    float64 stays as it is, and outside autocast nothing happens. It runs before the checks, so that
    under autocast a float32 query with a bfloat16 key is accepted, as users expect.
    """
    first = tensors[0]
    if not isinstance(first, Tensor) or not autocast_enabled(first.device.type):
        return tensors
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        return tensors
    device_type = first.device.type
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        tensor.to(dtype)
        if tensor.dtype not in (dtype, torch.float64) and tensor.dtype.is_floating_point
        else tensor
        for tensor in tensors
    )


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which our float32 arithmetic stays float32."""
    device_type = tensor.device.type
    if autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


# Looked up once, because torch.compile cannot trace the lookup.
_AUTOCAST_DEVICES = frozenset(
    name
    for name in ("cpu", "cuda", "hpu", "ipu", "maia", "mps", "mtia", "xla", "xpu")
    if torch.amp.is_autocast_available(name)
)


def autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on for a kind of device."""
    return device_type in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device_type)
