"""The choice of exact keys by query from tensors to kernels: allocate, choose sizes, launch.

Dimension legend: see `lln.kernels.keys.launch_keys`; F = 2D features, L keys in a list.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lln.kernels.keys import triton_list_choice as list_choice
from lln.kernels.keys.launch_choice import launch
from lln.kernels.keys.lists import list_shapes
from lln.kernels.launching.kernel_arguments import mask_bytes
from lln.kernels.launching.limits import power_of_two
from lln.kernels.launching.recipes import on_device
from lln.kernels.launching.stretches import cdiv

# Tokens whose features a program finds and sorts.
TILE = 64
# Keys and features of a program that finds the largest.
SEGMENT, FEATURES = 512, 16
# With more, one such program would fill a multiprocessor; up to 96 bytes of a thread spill.
REGISTERS = 128
# Low bits that all values of a type have in common, as float32.
SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


def choose_lists(
    query: Tensor, key: Tensor, mask: Tensor | None, keys: int, flip: bool
) -> tuple[Tensor, ...]:
    """Everything that attention to the lists of features needs, see `lln.kernels.keys.lists.Lists`.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, T, D]``.
        mask: bool ``[B, T]`` or None.
        keys: K, at most T.
        flip: Whether scores have a negative factor.
    """
    shapes = list_shapes(query, key, keys)
    device, width = query.device, query.shape[3]
    lists, order, starts = (
        torch.empty(shapes[name], dtype=torch.int32, device=device)
        for name in ("keys", "order", "starts")
    )
    features = torch.empty(shapes["features"], dtype=torch.int16, device=device)
    members = torch.zeros(shapes["members"], dtype=torch.int32, device=device)
    if order.numel() == 0 or lists.numel() == 0:
        return lists, features, order, starts.zero_(), members
    with on_device(device):
        _sort_entries(query, mask, flip, features, order, starts)
        _find_lists(key, mask, lists)
        tokens, words, longest = *members.shape[2:], lists.shape[4]
        few = max(1, min(32, 1024 // power_of_two(longest)))
        programs = key.shape[0] * key.shape[1] * cdiv(2 * width, few)
        launch(
            list_choice.members_kernel, (programs,), lists, members, tokens, longest, words,
            F=2 * width, BF=few, BL=power_of_two(longest), num_warps=4,
        )  # fmt: skip
    return lists, features, order, starts, members


def _sort_entries(
    query: Tensor,
    mask: Tensor | None,
    flip: bool,
    features: Tensor,
    order: Tensor,
    starts: Tensor,
) -> None:
    """Write the features of all queries, their entries by feature, and where features start."""
    batch, heads, tokens, width = query.shape
    tiles, count = cdiv(tokens, TILE), 2 * width
    counts = torch.empty((batch * heads, count * tiles), dtype=torch.int32, device=query.device)
    grid = (tiles * batch * heads,)
    launch(
        list_choice.features_kernel, grid, query, mask_bytes(mask, query), features, counts, tokens,
        heads, tiles, *query.stride(), D=width, BD=max(16, power_of_two(width)), BT=TILE,
        BF=max(16, power_of_two(count)), FLIP=flip, HAS_MASK=mask is not None, num_warps=4,
    )  # fmt: skip
    ends = counts.cumsum(-1, dtype=torch.int32)
    starts[..., 0] = 0
    starts[..., 1:] = ends.view(batch, heads, count, tiles)[..., -1]
    launch(
        list_choice.order_kernel, grid, features, counts, ends, order, tokens, tiles, F=count,
        BT=TILE, num_warps=4,
    )  # fmt: skip


def _find_lists(key: Tensor, mask: Tensor | None, lists: Tensor) -> None:
    """Fill the lists: rounds that each leave the L largest of every segment of keys."""
    batch, key_heads, tokens, width = key.shape
    longest, device = lists.shape[4], key.device
    has_second = lists.shape[0] == 2
    # A round must leave at most half, or there would be no end.
    segment = max(SEGMENT, 2 * power_of_two(longest))
    groups = cdiv(2 * width, FEATURES)
    found, count, is_first = key, tokens, True
    while True:
        segments = cdiv(count, segment)
        is_last = segments == 1
        # The last round leaves the lists.
        left = lists
        if not is_last:
            size = batch * key_heads * 2 * width * segments * longest
            left = torch.empty(size, dtype=torch.int32, device=device)
        launch(
            list_choice.largest_kernel, (segments * groups * batch * key_heads,),
            key, found, mask_bytes(mask, key), left, lists[-1], count, tokens, key_heads, longest,
            groups, segments, *key.stride(), D=width, BC=FEATURES,
            S=min(segment, max(16, power_of_two(count))), BL=power_of_two(longest),
            IS_FIRST=is_first, HAS_SECOND=is_last and has_second, HAS_MASK=mask is not None,
            SHIFT=SHIFT[key.dtype], num_warps=8, maxnreg=REGISTERS,
        )  # fmt: skip
        if is_last:
            return
        found, count, is_first = left, segments * longest, False
