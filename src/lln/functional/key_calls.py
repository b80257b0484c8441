"""Calls with exact keys: what is missing is matched and chosen.

Dimension legend: as in `lln.checks.call`; G groups of queries, K keys per group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lln.checks.call import Call
from lln.cpu.run import choose_keys as choose_compiled
from lln.eager.key_blocks import Groups, dense_blocks, packed_blocks
from lln.eager.selection import choose, drop_repeats, seen_keys
from lln.functional.match import measure_heads, with_temperatures
from lln.kernels.keys.keys_ops import fused_choice
from lln.matching.mass import keys_temperatures, mass_offset
from lln.matching.moments import packed_moments


def with_numbers(call: Call, impl: str) -> Call:
    """The call with α, β and the offset in place, found by ``impl``."""
    alpha, beta, offset = call.alpha, call.beta, call.offset
    if alpha is not None and offset is not None:
        return call
    measured = call
    if impl == "reference":
        query, key = call.query.double(), call.key.double()
        measured = call.replace(query=query, key=key)
    if call.bounds is None:
        moments = measure_heads(measured.query, measured.key, call.key_mask, impl)
    else:
        moments = packed_moments(measured.query, measured.key, call.bounds.long())
    if alpha is None and call.matching == "paper":
        known = with_temperatures(measured, impl)
        alpha, beta = known.alpha, known.beta
    elif alpha is None:
        alpha, beta = keys_temperatures(moments, call.query.shape[-1], call.matching)
    if offset is None:
        offset = mass_offset(moments, alpha, beta, call.query.shape[-1], call.scale)
    return call.replace(alpha=alpha, beta=beta, offset=offset)


def complete(call: Call, impl: str) -> Call:
    """The same with the indices of the keys in place, too."""
    call, keys = with_numbers(call, impl), call.keys
    keys = _usable(call, keys) if isinstance(keys, Tensor) else choose_for(call, impl)
    return call.replace(keys=keys)


def _usable(call: Call, indices: Tensor) -> Tensor:
    """A caller's indices without repeated ones, and -1 for those that a group may not see."""
    indices = drop_repeats(indices.long())
    if call.bounds is not None:
        return indices
    return torch.where(seen_keys(indices, _groups(call)), indices, -1)


def choose_for(call: Call, impl: str) -> Tensor:
    """Indices of the keys a call asks for by number: ``[B, H, G, K]``, packed ``[H, G, K]``."""
    assert isinstance(call.keys, int)
    query, key, keys = call.query, call.key, call.keys
    # A negative factor of the scores turns the choice around.
    flip = call.scale is not None and call.scale < 0
    if call.bounds is None:
        if impl == "triton":
            sizes = {"block_size": call.block_size, "group_size": call.group_size}
            return fused_choice(query, key, call.key_mask, keys, **sizes, flip=flip)
        if impl == "cpu" and query.numel() and keys:
            return choose_compiled(call)
        return choose(query, key, keys, _groups(call), flip=flip)
    query, key = query.transpose(0, 1)[None], key.transpose(0, 1)[None]
    if query.shape[2] == 0:
        return torch.full((query.shape[1], 0, 0), -1, dtype=torch.int64, device=query.device)
    blocks, _ = packed_blocks(call.bounds.long(), query.shape[2], call.block_size)
    groups = Groups(blocks, call.group_size)
    return choose(query, key, keys, groups, flip=flip)[0]


def _groups(call: Call) -> Groups:
    """Who chooses in a dense call."""
    batch, _, tokens, _ = call.query.shape
    blocks = dense_blocks(batch, tokens, call.block_size, call.key_mask, call.query.device)
    return Groups(blocks, call.group_size, call.key_mask)
