"""Moment matching by compiled passes (`lln.cpu.compiled_passes`): which calls, and how."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from lln.cpu import compiled_passes, library
from lln.matching.curves import SPREAD_FLOOR, spread_curve
from lln.precision import accumulation_dtype
from lln.tracing import is_untraced_on_cpu


def can_match_compiled(query: Tensor, key: Tensor, key_mask: Tensor | None = None) -> bool:
    """Whether `compiled_temperatures` knows a call."""
    if not is_untraced_on_cpu(query, key, key_mask) or library.load() is None:
        return False
    if accumulation_dtype(query.dtype) != torch.float32:
        return False
    return bool(query.numel() and key.numel())


def compiled_temperatures(
    query: Tensor, key: Tensor, key_mask: Tensor | None, criterion: str
) -> tuple[Tensor, Tensor]:
    """`lln.matching.moments.head_temperatures` by compiled passes."""
    curves = compiled_curves(key, key_mask, criterion)
    query, key = query.to(torch.float32), key.to(torch.float32)
    return compiled_passes.match(query, key, curves, key_mask)


def compiled_curves(key: Tensor, key_mask: Tensor | None, criterion: str) -> list[bytes]:
    """The curves of keys ``[B, H, S, D]``, as compiled passes take them; with a mask B of them."""
    numbers = [key.shape[2]] if key_mask is None else key_mask.sum(-1).tolist()
    return [_compiled_curve(key.shape[-1], number, criterion) for number in numbers]


@cache
def _compiled_curve(head_width: int, keys: int, criterion: str) -> bytes:
    curve = spread_curve(head_width, criterion)
    least, most = curve.n_range
    x = math.log(min(max(keys, least), most) / 1024)
    slopes = (*curve.slopes, 0.0)
    coefficients = [one + x * slope for one, slope in zip(curve.coefficients, slopes, strict=True)]
    return compiled_passes.packed_curve(coefficients, curve.p_range, SPREAD_FLOOR**2)
