"""Calls with exact keys: what is missing is matched and chosen, then the plan is executed.

Dimension legend: as in `lln.functional.request`; G groups of queries, K keys per group.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lln.eager import run as eager
from lln.eager.infinity import as_nan
from lln.eager.key_attention import attend_keys, slots_of_blocks
from lln.eager.key_blocks import KeyBlocks, dense_blocks, packed_blocks
from lln.eager.packing import per_tile
from lln.eager.selection import choose, drop_repeats, picked_lists, seen_keys
from lln.functional.match import measure_heads
from lln.functional.plan import Plan
from lln.functional.request import Request
from lln.kernels.keys.keys_ops import fused_choice, fused_keys, fused_lists
from lln.kernels.keys.lists import Lists
from lln.matching.mass import keys_temperatures, mass_offset
from lln.matching.moments import Moments, packed_moments, tensor_moments
from lln.precision import accumulation_dtype


def with_all_keys(request: Request) -> Request:
    """With no more tokens than keys every way takes all, and that of a block does so quickly."""
    keys, query = request.keys, request.query
    if request.select == "block" or request.bounds is not None or not isinstance(keys, int):
        return request
    if keys < query.shape[2]:
        return request
    return Request(*request[:15], keys, "block", request.block_size, request.offset)


def complete(request: Request, plan: Plan) -> Request:
    """The request with α, β, the offset and the indices of the keys in place."""
    alpha, beta, offset = request.alpha, request.beta, request.offset
    if alpha is None or offset is None:
        measured = request
        if plan.impl == "reference":
            query, key = request.query.double(), request.key.double()
            measured = Request(request.kind, query, key, *request[3:])
        moments = _moments(measured, plan)
        if alpha is None:
            alpha, beta = _temperatures(measured, moments)
        if offset is None:
            width = request.query.shape[-1]
            offset = mass_offset(moments, alpha, beta, width, request.scale)
    keys: Any = request.keys
    if isinstance(keys, Tensor):
        keys = _usable(request, keys)
    elif plan.impl == "triton" and request.select == "query" and request.bounds is None:
        keys = _lists(request, keys)
    else:
        keys = choose_for(request, plan)
    first = (request.kind, *request[1:4], alpha, beta, *request[6:15])
    return Request(*first, keys, request.select, request.group_size, offset)


def _usable(request: Request, indices: Tensor) -> Tensor:
    """A caller's indices without repeated ones, and -1 for those that a group may not see."""
    indices = drop_repeats(indices.long())
    if request.bounds is not None:
        return indices
    mask, causal = request.key_mask, request.is_causal
    seen = seen_keys(indices, _dense_blocks(request), request.group_size, mask, causal)
    return torch.where(seen, indices, -1)


def chosen_indices(request: Request) -> Any:
    """The indices ``[B, H, G, K]`` of a completed request, whatever form its keys have."""
    keys = request.keys
    return _spelt_out(request, keys) if isinstance(keys, Lists) else keys


def _spelt_out(request: Request, lists: Lists) -> Tensor:
    """The keys that every query sees by lists, one by one: ``[B, H, G, K]``."""
    first, second = (table.unsqueeze(2) for table in (lists.keys[0], lists.keys[-1]))
    features = lists.features.transpose(2, 3)
    found = picked_lists(first, second, features, _dense_blocks(request), request.key_mask)
    # Of an odd number the second list has an empty place, which was sorted to the end.
    odd = lists.keys.shape[0] - 1
    return found[..., : found.shape[-1] - odd]


def _lists(request: Request, keys: int) -> Lists:
    """The keys of every feature, by the kernels."""
    flip = request.scale is not None and request.scale < 0
    return fused_lists(request.query, request.key, request.key_mask, keys, flip=flip)


def _by_kernels(request: Request, keys: int) -> Tensor:
    """A dense choice by the kernels: ``[B, H, G, K]``."""
    if request.select == "query":
        return _spelt_out(request, _lists(request, keys))
    sizes = {"block_size": request.block_size, "group_size": request.group_size}
    flip = request.scale is not None and request.scale < 0
    return fused_choice(request.query, request.key, request.key_mask, keys, **sizes, flip=flip)


def choose_for(request: Request, plan: Plan) -> Tensor:
    """Indices of the keys a request asks for by number: ``[B, H, G, K]``, packed ``[H, G, K]``."""
    assert isinstance(request.keys, int)
    options: dict[str, Any] = {"select": request.select, "group_size": request.group_size}
    options["is_causal"] = request.is_causal
    options["flip"] = request.scale is not None and request.scale < 0
    query, key, keys = request.query, request.key, request.keys
    if request.bounds is None:
        few = request.select != "block" and keys >= query.shape[2]
        if plan.selection == "triton" and not few:
            return _by_kernels(request, keys)
        blocks = _dense_blocks(request)
        return choose(query, key, keys, blocks, key_mask=request.key_mask, **options)
    query, key = query.transpose(0, 1)[None], key.transpose(0, 1)[None]
    if query.shape[2] == 0:
        return torch.full((query.shape[1], 0, 0), -1, dtype=torch.int64, device=query.device)
    blocks, _ = packed_blocks(request.bounds.long(), query.shape[2], request.block_size)
    if request.select == "block":
        return choose(query, key, keys, blocks, key_mask=None, **options)[0]
    return _choose_one_by_one(query, key, keys, request, blocks, options)


def attend_dense_keys(request: Request, plan: Plan) -> Tensor:
    """A dense call: ``[B, H, T, E]``."""
    sides = (request.query, request.key, request.value, request.alpha, request.beta)
    keys = request.keys
    assert not isinstance(keys, int)
    if plan.impl == "triton":
        return fused_keys(
            *sides,
            request.offset,
            keys,
            key_mask=request.key_mask,
            block_size=request.block_size,
            group_size=request.group_size,
            scale=request.scale,
        )
    assert isinstance(keys, Tensor)
    return eager.exact_keys(
        *sides,
        request.offset,
        keys,
        request.key_mask,
        block_size=request.block_size,
        group_size=request.group_size,
        is_causal=request.is_causal,
        scale=request.scale,
        impl=plan.impl,
    )


def attend_packed_keys(request: Request, plan: Plan) -> Tensor:
    """A packed call in plain PyTorch or by the reference: ``[T, H, E]``."""
    assert isinstance(request.keys, Tensor)
    assert request.bounds is not None
    bounds = request.bounds.long()
    dtype, tokens = accumulation_dtype(request.query.dtype), request.query.shape[0]
    query, key, value = (side.to(dtype).transpose(0, 1)[None] for side in request[1:4])
    query, key = as_nan(query), as_nan(key)
    blocks, sequence = packed_blocks(bounds, tokens, request.block_size)
    indices = request.keys[None]
    if plan.impl == "reference":
        return _reference_one_by_one(request, query, key, value, indices)
    heads = query.shape[1]
    key, value = eager.repeat_heads(key, heads), eager.repeat_heads(value, heads)
    per_block = [
        per_tile(side, sequence, query) for side in (request.alpha, request.beta, request.offset)
    ]
    alpha, beta, offset = (
        side.unsqueeze(0) if isinstance(side, Tensor) else side for side in per_block
    )
    slots = slots_of_blocks(key, value, beta, blocks, None, sequence, request.is_causal)
    out = attend_keys(
        query,
        key,
        value,
        alpha,
        slots,
        offset,
        indices,
        blocks,
        group_size=request.group_size,
        key_mask=None,
        is_causal=request.is_causal,
        scale=request.scale,
    )
    return out[0].transpose(0, 1).to(request.query.dtype)


def _moments(request: Request, plan: Plan) -> Moments:
    if request.bounds is None:
        return measure_heads(request.query, request.key, request.key_mask, plan.impl)
    return packed_moments(request.query, request.key, request.bounds.long())


def _temperatures(request: Request, moments: Moments) -> tuple[Tensor, Tensor]:
    if request.matching == "paper":
        return paper_temperatures(request)
    return keys_temperatures(moments, request.query.shape[-1], request.matching)


def paper_temperatures(request: Request) -> tuple[Tensor, Tensor]:
    """α and β of ``matching="paper"``, ``[1, 1, 1, 1]``: one statistic over all tokens."""
    query, key = request.query, request.key
    if request.bounds is not None:
        query, key = query.transpose(0, 1)[None], key.transpose(0, 1)[None]
    moments = tensor_moments(query, key, request.key_mask)
    return keys_temperatures(moments, query.shape[-1], "paper")


def _dense_blocks(request: Request) -> KeyBlocks:
    batch, _, tokens, _ = request.query.shape
    device = request.query.device
    return dense_blocks(batch, tokens, request.block_size, request.key_mask, device)


def _choose_one_by_one(
    query: Tensor,
    key: Tensor,
    keys: int,
    request: Request,
    blocks: KeyBlocks,
    options: dict[str, Any],
) -> Tensor:
    """Choices by features, which are ranked within a sequence; waits for the bounds' values."""
    assert request.bounds is not None
    size = request.block_size
    found = torch.full((query.shape[1], blocks.place.shape[1] * size, keys), -1, dtype=torch.int64)
    found = found.to(query.device)
    block = 0
    for start, end in pairwise(request.bounds.tolist()):
        if start == end:
            continue
        own_query, own_key = (side[:, :, start:end] for side in (query, key))
        own = dense_blocks(1, end - start, size, None, query.device)
        chosen = choose(own_query, own_key, keys, own, key_mask=None, **options)[0]
        chosen = torch.where(chosen < 0, -1, chosen + start)
        found[:, block * size : block * size + chosen.shape[1], : chosen.shape[2]] = chosen
        block += own.place.shape[1]
    return found


def _reference_one_by_one(
    request: Request, query: Tensor, key: Tensor, value: Tensor, indices: Tensor
) -> Tensor:
    """Packed sequences by the reference: one dense call per sequence."""
    assert request.bounds is not None
    rows = request.block_size // request.group_size
    outs, block = [], 0
    for number, (start, end) in enumerate(pairwise(request.bounds.tolist())):
        count = -(-(end - start) // request.block_size)
        chosen = indices[:, :, block * rows : (block + count) * rows]
        chosen = torch.where((chosen >= start) & (chosen < end), chosen - start, -1)
        block += count
        alpha, beta, offset = (
            side[number : number + 1]
            if isinstance(side, Tensor) and side.dim() == 4 and side.shape[0] > 1
            else side
            for side in (request.alpha, request.beta, request.offset)
        )
        own_query, own_key, own_value = (side[:, :, start:end] for side in (query, key, value))
        out = eager.exact_keys(
            own_query,
            own_key,
            own_value,
            alpha,
            beta,
            offset,
            chosen,
            None,
            block_size=request.block_size,
            group_size=request.group_size,
            is_causal=request.is_causal,
            scale=request.scale,
            impl="reference",
        )
        outs.append(out[0].transpose(0, 1).to(request.query.dtype))
    return torch.cat(outs)
