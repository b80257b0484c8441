"""Calls with exact keys: what is missing is matched and chosen.

Dimension legend: as in `lln.checks.call`; G groups of queries, K keys per group.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lln.checks.call import Call
from lln.cpu.run import choose_keys as choose_compiled
from lln.eager.key_blocks import Groups, KeyBlocks, dense_blocks, packed_blocks
from lln.eager.selection import choose, drop_repeats, picked_lists, seen_keys
from lln.functional.match import measure_heads
from lln.kernels.keys.keys_ops import fused_choice, fused_lists
from lln.kernels.keys.lists import Lists
from lln.matching.mass import keys_temperatures, mass_offset
from lln.matching.moments import Moments, packed_moments, tensor_moments


def with_all_keys(call: Call) -> Call:
    """With no more tokens than keys every way takes all, and that of a block does so quickly."""
    keys, query = call.keys, call.query
    if call.select == "block" or call.bounds is not None or not isinstance(keys, int):
        return call
    if keys < query.shape[2]:
        return call
    return call.replace(select="block", group_size=call.block_size)


def with_numbers(call: Call, impl: str) -> Call:
    """The call with α, β and the offset in place, found by ``impl``."""
    alpha, beta, offset = call.alpha, call.beta, call.offset
    if alpha is not None and offset is not None:
        return call
    measured = call
    if impl == "reference":
        query, key = call.query.double(), call.key.double()
        measured = call.replace(query=query, key=key)
    moments = _moments(measured, impl)
    if alpha is None:
        alpha, beta = _temperatures(measured, moments)
    if offset is None:
        offset = mass_offset(moments, alpha, beta, call.query.shape[-1], call.scale)
    return call.replace(alpha=alpha, beta=beta, offset=offset)


def complete(call: Call, impl: str) -> Call:
    """The same with the indices of the keys in place, too."""
    call, keys = with_numbers(call, impl), call.keys
    if isinstance(keys, Tensor):
        keys = _usable(call, keys)
    elif impl == "triton" and call.select == "query" and call.bounds is None:
        keys = _lists(call, keys)
    else:
        keys = choose_for(call, impl)
    return call.replace(keys=keys)


def _usable(call: Call, indices: Tensor) -> Tensor:
    """A caller's indices without repeated ones, and -1 for those that a group may not see."""
    indices = drop_repeats(indices.long())
    if call.bounds is not None:
        return indices
    return torch.where(seen_keys(indices, _groups(call)), indices, -1)


def chosen_indices(call: Call) -> Any:
    """The indices ``[B, H, G, K]`` of a completed call, whatever form its keys have."""
    keys = call.keys
    return _spelt_out(call, keys) if isinstance(keys, Lists) else keys


def _spelt_out(call: Call, lists: Lists) -> Tensor:
    """The keys that every query sees by lists, one by one: ``[B, H, G, K]``."""
    first, second = (table.unsqueeze(2) for table in (lists.keys[0], lists.keys[-1]))
    features = lists.features.transpose(2, 3)
    found = picked_lists(first, second, features, _groups(call))
    # Of an odd number the second list has an empty place, which was sorted to the end.
    odd = lists.keys.shape[0] - 1
    return found[..., : found.shape[-1] - odd]


def _lists(call: Call, keys: int) -> Lists:
    """The keys of every feature, by the kernels."""
    return fused_lists(call.query, call.key, call.key_mask, keys, flip=_flips(call))


def _by_kernels(call: Call, keys: int) -> Tensor:
    """A dense choice by the kernels: ``[B, H, G, K]``."""
    if call.select == "query":
        return _spelt_out(call, _lists(call, keys))
    sizes = {"block_size": call.block_size, "group_size": call.group_size}
    return fused_choice(call.query, call.key, call.key_mask, keys, **sizes, flip=_flips(call))


def choose_for(call: Call, impl: str) -> Tensor:
    """Indices of the keys a call asks for by number: ``[B, H, G, K]``, packed ``[H, G, K]``."""
    assert isinstance(call.keys, int)
    options: dict[str, Any] = {"select": call.select, "flip": _flips(call)}
    query, key, keys = call.query, call.key, call.keys
    if call.bounds is None:
        few = call.select != "block" and keys >= query.shape[2]
        if impl == "triton" and not few:
            return _by_kernels(call, keys)
        if impl == "cpu" and call.query.numel() and keys:
            return choose_compiled(call)
        return choose(query, key, keys, _groups(call), **options)
    query, key = query.transpose(0, 1)[None], key.transpose(0, 1)[None]
    if query.shape[2] == 0:
        return torch.full((query.shape[1], 0, 0), -1, dtype=torch.int64, device=query.device)
    blocks, _ = packed_blocks(call.bounds.long(), query.shape[2], call.block_size)
    if call.select == "block":
        groups = Groups(blocks, call.group_size, is_causal=call.is_causal)
        return choose(query, key, keys, groups, **options)[0]
    return _choose_one_by_one(query, key, keys, call, blocks, options)


def _moments(call: Call, impl: str) -> Moments:
    if call.bounds is None:
        return measure_heads(call.query, call.key, call.key_mask, impl)
    return packed_moments(call.query, call.key, call.bounds.long())


def _temperatures(call: Call, moments: Moments) -> tuple[Tensor, Tensor]:
    if call.matching == "paper":
        return paper_temperatures(call)
    return keys_temperatures(moments, call.query.shape[-1], call.matching)


def paper_temperatures(call: Call) -> tuple[Tensor, Tensor]:
    """α and β of ``matching="paper"``, ``[1, 1, 1, 1]``: one statistic over all tokens."""
    query, key = call.query, call.key
    if call.bounds is not None:
        query, key = query.transpose(0, 1)[None], key.transpose(0, 1)[None]
    moments = tensor_moments(query, key, call.key_mask)
    return keys_temperatures(moments, query.shape[-1], "paper")


def _groups(call: Call) -> Groups:
    """Who chooses in a dense call."""
    batch, _, tokens, _ = call.query.shape
    blocks = dense_blocks(batch, tokens, call.block_size, call.key_mask, call.query.device)
    return Groups(blocks, call.group_size, call.key_mask, call.is_causal)


def _flips(call: Call) -> bool:
    """Whether the scores have a negative factor, which turns the choice around."""
    return call.scale is not None and call.scale < 0


def _choose_one_by_one(
    query: Tensor,
    key: Tensor,
    keys: int,
    call: Call,
    blocks: KeyBlocks,
    options: dict[str, Any],
) -> Tensor:
    """Choices by features, which are ranked within a sequence; waits for the bounds' values."""
    assert call.bounds is not None
    size = call.block_size
    found = torch.full((query.shape[1], blocks.place.shape[1] * size, keys), -1, dtype=torch.int64)
    found = found.to(query.device)
    block = 0
    for start, end in pairwise(call.bounds.tolist()):
        if start == end:
            continue
        own_query, own_key = (side[:, :, start:end] for side in (query, key))
        own = dense_blocks(1, end - start, size, None, query.device)
        groups = Groups(own, call.group_size, is_causal=call.is_causal)
        chosen = choose(own_query, own_key, keys, groups, **options)[0]
        chosen = torch.where(chosen < 0, -1, chosen + start)
        found[:, block * size : block * size + chosen.shape[1], : chosen.shape[2]] = chosen
        block += own.place.shape[1]
    return found
