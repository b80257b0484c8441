"""Checks that only attention with exact keys needs.

Dimension legend: B batch, H query heads, G groups of queries, K keys per group.
"""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from lln.checks.arguments import MATCHING_CRITERIA, check_count, check_flag, check_per_head
from lln.checks.names import shown
from lln.checks.tensors import check_tensor, shape_of, wrong_device
from lln.errors import InvalidInputError
from lln.tracing import values_are_readable

KEYS_MATCHING = ("rest", *MATCHING_CRITERIA)


def check_group_size(group_size: int | None, block_size: int) -> int:
    """Refuse groups that do not divide a block.

    Returns:
        How many queries share their keys; a block, unless told otherwise.
    """
    if group_size is None:
        return block_size
    check_count("group_size", group_size)
    if block_size % group_size:
        raise InvalidInputError(
            f"group_size must divide block_size, got {group_size} and {block_size}."
        )
    return group_size


def check_keys(keys: int | Tensor, groups: tuple[int, ...], device: torch.device) -> None:
    """Refuse a number of keys below 0, or indices of another shape than ``[B, H, G, K]``.

    ``groups`` is ``(B, H, G)``, or ``(H, G)`` for packed sequences.
    """
    if not isinstance(keys, Tensor):
        check_count("keys", keys, 0)
        return
    check_tensor("keys", keys, "a number, or indices in an int32 or int64 tensor")
    if keys.dtype not in (torch.int32, torch.int64):
        raise InvalidInputError(f"keys must be a number, int32 or int64, got {keys.dtype}.")
    if keys.dim() != len(groups) + 1 or tuple(keys.shape[:-1]) != groups:
        axes = "[B, H, G, K]" if len(groups) == 3 else "[H, G, K]"
        raise InvalidInputError(
            f"keys must be indices {axes} = [{', '.join(map(str, groups))}, K] as lln.choose_keys "
            f"returns them for the same block_size, group_size and key_mask, got shape "
            f"{shape_of(keys)}."
        )
    if keys.device != device:
        raise wrong_device("keys", keys, device)


def check_not_causal(is_causal: bool) -> None:
    """Refuse causal calls."""
    check_flag("is_causal", is_causal)
    if is_causal:
        raise InvalidInputError(
            "attention with exact keys is never causal: use lln.page_attention, whose queries see "
            "near tokens, the first ones and chosen pages of the past, also from a cache."
        )


def check_offset(
    offset: float | Tensor | None, batch: int, heads: int, device: torch.device
) -> None:
    """Refuse an offset that is not finite or does not broadcast to ``[B, H, 1, 1]``."""
    if offset is None or (type(offset) is float and -math.inf < offset < math.inf):
        return
    if not isinstance(offset, Tensor):
        if isinstance(offset, bool) or not isinstance(offset, Real) or not math.isfinite(offset):
            raise InvalidInputError(
                f"offset must be a finite number or a tensor, got {shown(offset)}."
            )
        return
    check_per_head("offset", offset, batch, (heads,), device)
    # A few numbers: comparing them in PyTorch takes ten times as long.
    if values_are_readable(offset) and not all(map(math.isfinite, offset.flatten().tolist())):
        raise InvalidInputError("offset must be finite everywhere.")
