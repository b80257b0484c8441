"""Exact keys with a summary and chosen rows from elsewhere, from tensors to kernels.

A rank of several calls it (`lln.parallel`). Forward, the kernels are those of one process
(`launch_keys`); backward, the summary's gradient is returned instead of spread over the
keys.

Dimension legend: see `launch_keys`; S rows of key and value, of which T are tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lln.kernels.keys import triton_sharded_keys
from lln.kernels.keys.keys_call import KeysCall
from lln.kernels.keys.keys_sizes import STAGES, rows_at_once, sizes_of, warps
from lln.kernels.keys.launch_choice import launch
from lln.kernels.keys.launch_keys import (
    far_gradients,
    heads_at_once,
    in_order,
    read_keys,
    short_dtype,
    slot_gradients,
)
from lln.kernels.launching.recipes import on_device
from lln.kernels.launching.stretches import cdiv


def attend_sharded_keys(call: KeysCall) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[B, H, T, E]``, log-normalisers ``[B, H, T]`` and the slots' levels ``[B, H, G]``.

    Args:
        call: With T > 0 and a summary from outside.
    """
    assert call.outside is not None
    return read_keys(call, call.outside.summary)


def sharded_keys_gradients(
    call: KeysCall, gradient: Tensor, out: Tensor, lse: Tensor, levels: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, α, offset, and of log-mass, centroid and mean key.

    Those of α and offset are ``[B, H, 1, 1]``; the last three are in float32, and that of the mean
    key is without what log-mass holds of it.
    """
    assert call.outside is not None
    query, key, value = call.query, call.key, call.value
    (batch, heads), slots = query.shape[:2], call.summary_heads
    dq, dk, dv = (torch.empty_like(side) for side in (query, key, value))
    delta = torch.empty_like(lse)
    summary = call.outside.summary
    parts, scalars = slot_gradients(call, gradient, out, dq, lse, levels, delta, summary)
    # Of all programs and query heads that read a summary; always in the same order.
    dcentroid, dlog_mass, dcentre = (
        part.view(batch, slots, -1, *part.shape[2:]).sum(2) for part in parts
    )
    del parts
    _key_gradients(call, gradient, (dq, dk, dv), lse, delta)
    of_alpha, of_offset = (side.sum(-1).view(batch, heads, 1, 1) for side in scalars)
    return dq, dk, dv, of_alpha, of_offset, dlog_mass, dcentroid, dcentre


def _key_gradients(
    call: KeysCall,
    gradient: Tensor,
    wanted: tuple[Tensor, Tensor, Tensor],
    lse: Tensor,
    delta: Tensor,
) -> None:
    """Add blocks and chosen rows to dq, and write dk and dv."""
    query, key, value = call.query, call.key, call.value
    batch, heads, tokens, width = query.shape
    key_heads, behind, device = key.shape[1], key.shape[2] - tokens, query.device
    groups, keys = call.indices.shape[2:]
    dq, dk, dv = wanted
    sizes, masking = sizes_of(call), call.masking
    shape = {name: sizes[name] for name in ("W", "D", "E", "BD", "BE", "BW", "R", "PRECISION")}
    with on_device(device):
        launch(
            triton_sharded_keys.keys_own_kernel, (call.blocks * batch * key_heads,), query, key,
            value, gradient, dk, dv, lse, delta, masking[0], call.scale, tokens, heads, key_heads,
            call.blocks, *query.stride(), *key.stride(), *value.stride(), *gradient.stride(),
            *dk.stride(), *dv.stride(), **shape, HAS_MASK=sizes["HAS_MASK"], EVEN=sizes["EVEN"],
            num_warps=warps("key", sizes),
        )  # fmt: skip
    cuts = cdiv(behind, call.block_size)
    # Before the pairs take their memory, because sorting needs some of its own.
    order, starts = in_order(*_parts_of(call, cuts))
    share, each = heads // key_heads, heads_at_once(call)
    pairs = each * share * groups * keys
    pair_dk = torch.empty((pairs, width), dtype=query.dtype, device=device)
    pair_dv = torch.empty((pairs, value.shape[3]), dtype=query.dtype, device=device)
    pairs_of = (pair_dk, pair_dv)
    for first in range(0, batch * key_heads, each):
        count = min(each, batch * key_heads - first)
        with on_device(device):
            some = (masking[:2], first * share, count * share)
            far_gradients(call, gradient, dq, lse, delta, pairs_of, *some)
            if not cuts:
                continue
            launch(
                triton_sharded_keys.keys_rows_kernel, (cuts * count,), dk, dv, *pairs_of, order,
                call.indices, starts, first, tokens, behind, key_heads, groups, keys, cuts,
                *dk.stride(), *dv.stride(), **shape, BP=rows_at_once(call), STAGES=STAGES["key"],
                num_warps=warps("key", sizes),
            )  # fmt: skip


def _parts_of(call: KeysCall, cuts: int) -> tuple[Tensor, int]:
    """For every pair which W of the rows behind the tokens it chose, counted over all heads.

    Args:
        call: The call.
        cuts: Into how many parts of W rows they are cut.

    Returns:
        The number of the part, and that of pairs without a key.
    """
    batch, heads = call.indices.shape[:2]
    last = batch * heads * cuts
    line = torch.arange(batch * heads, device=call.indices.device, dtype=torch.int32)
    part = (call.indices - call.query.shape[2]) // call.block_size
    part += line.view(batch, heads, 1, 1) * cuts
    return torch.where(call.indices < 0, last, part).flatten().to(short_dtype(last)), last
