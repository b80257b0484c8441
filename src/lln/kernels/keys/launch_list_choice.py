"""The choice of exact keys by query from tensors to kernels: allocate, choose sizes, launch.

Dimension legend: see `lln.kernels.keys.launch_keys`; F = 2D features, L keys in a list.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lln.kernels.keys import triton_list_choice as list_choice
from lln.kernels.keys.lists import list_shapes
from lln.kernels.launching.kernel_arguments import mask_bytes, strides_of
from lln.kernels.launching.limits import power_of_two
from lln.kernels.launching.recipes import Place, Recipe, Step, Workspace, launch_fixed
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
    (batch, heads, tokens, _), count = query.shape, 2 * width
    tiles, options = cdiv(tokens, TILE), (flip, mask is None, keys)
    counts = torch.empty((batch * heads, count * tiles), dtype=torch.int32, device=device)
    runtime = {"p_q": query, "p_k": key, "p_mask": mask_bytes(mask, query), "p_counts": counts}
    runtime |= {"p_features": features}

    def write_features() -> Recipe:
        values = {"T": tokens, "H": heads, "tiles": tiles, "HAS_MASK": mask is not None}
        values |= {"D": width, "BD": max(16, power_of_two(width)), "BT": TILE, "FLIP": flip}
        values |= {"BF": max(16, power_of_two(count)), **strides_of(False, p_q=query)}
        grid = (tiles * batch * heads,)
        return Recipe([Step(list_choice.features_kernel, grid, values, 4)], {})

    launch_fixed(("features", *options), runtime, device, write_features)
    ends = counts.cumsum(-1, dtype=torch.int32)
    starts[..., 0] = 0
    starts[..., 1:] = ends.view(batch, heads, count, tiles)[..., -1]
    runtime |= {"p_ends": ends, "p_order": order, "p_lists": lists, "p_members": members}
    runtime["p_second"] = lists[-1]
    launch_fixed(
        ("lists", *options), runtime, device, lambda: _write_lists(query, key, mask, lists, members)
    )
    return lists, features, order, starts, members


def _write_lists(
    query: Tensor, key: Tensor, mask: Tensor | None, lists: Tensor, members: Tensor
) -> Recipe:
    """Sort the queries' entries by feature, find the lists, and mark for every key which hold it.

    The lists are found in rounds that each leave the L largest of every segment of keys.
    """
    batch, key_heads, tokens, width = key.shape
    longest, features, tiles = lists.shape[4], 2 * width, cdiv(query.shape[2], TILE)
    few = max(1, min(32, 1024 // power_of_two(longest)))
    values = {"T": tokens, "HK": key_heads, "L": longest, "words": members.shape[3]}
    values |= {"tiles": tiles, "BT": TILE, "BF": few, "BL": power_of_two(longest)}
    values |= {"F": features, "D": width, "BC": FEATURES, "SHIFT": SHIFT[key.dtype]}
    values |= {"HAS_MASK": mask is not None, **strides_of(False, p_k=key)}
    grid = (tiles * query.shape[0] * query.shape[1],)
    steps, workspace = [Step(list_choice.order_kernel, grid, values, 4)], Workspace()
    # A round must leave at most half, or there would be no end.
    segment = max(SEGMENT, 2 * power_of_two(longest))
    groups = cdiv(features, FEATURES)
    # The first round takes all keys.
    found, count, is_last = "p_k", tokens, False
    while not is_last:
        segments = cdiv(count, segment)
        is_last = segments == 1
        # The last round leaves the lists.
        left = "p_lists" if is_last else f"p_left{len(steps)}"
        if not is_last:
            size = batch * key_heads * features * segments * longest
            workspace[left] = (size,), torch.int32
        own = {"p_tokens": Place(found), "p_new_tokens": Place(left), "count": count}
        own |= {"groups": groups, "segments": segments, "IS_FIRST": found == "p_k"}
        own |= {"S": min(segment, max(16, power_of_two(count)))}
        own["HAS_SECOND"] = is_last and lists.shape[0] == 2
        grid = (segments * groups * batch * key_heads,)
        steps.append(Step(list_choice.largest_kernel, grid, values | own, 8, REGISTERS))
        found, count = left, segments * longest
    programs = batch * key_heads * cdiv(features, few)
    steps.append(Step(list_choice.members_kernel, (programs,), values, 4))
    return Recipe(steps, workspace)
