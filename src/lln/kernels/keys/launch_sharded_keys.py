"""Exact keys with a summary and chosen rows from elsewhere, from tensors to kernels.

A rank of several calls it (`lln.parallel`). Forward, the kernels are those of one process
(`launch_keys`); backward, the summary's gradient is returned instead of spread over the
keys.

Dimension legend: see `launch_keys`; S rows of key and value, of which T are tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.kernels.keys import triton_sharded_keys
from lln.kernels.keys.keys_call import KeysCall
from lln.kernels.keys.keys_sizes import STAGES, constant_args, rows_at_once, warps
from lln.kernels.keys.launch_keys import (
    SORTED_PAIRS,
    far_step,
    heads_at_once,
    in_order,
    named_summary,
    pair_memory,
    read_keys,
    short_dtype,
)
from lln.kernels.keys.launch_slots import gradient_parts, gradient_step
from lln.kernels.launching.recipes import Recipe, Step, launch_fixed
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
    query, device = call.query, call.query.device
    (batch, heads), slots = query.shape[:2], call.summary_heads
    dq, dk, dv = (torch.empty_like(side) for side in (query, call.key, call.value))
    runtime = call.runtime(p_g=gradient, p_o=out, p_lse=lse, p_dq=dq, p_dk=dk, p_dv=dv)
    runtime |= named_summary(call.outside.summary) | {"p_delta": torch.empty_like(lse)}
    strides = {"p_o": out, "p_g": gradient, "p_dq": dq, "p_dk": dk, "p_dv": dv}
    parts, scalars = gradient_parts(call)
    launch_fixed(
        ("slot gradients of a rank", *call.options),
        {**runtime, "p_level": levels, **parts},
        device,
        lambda: Recipe([gradient_step(call, constant_args(call, **strides))], {}),
    )
    # Of all programs and query heads that read a summary; always in the same order.
    dcentroid, dlog_mass, dcentre = (
        parts[name].view(batch, slots, -1, *parts[name].shape[2:]).sum(2)
        for name in ("p_dc_parts", "p_dl_parts", "p_dm_parts")
    )
    del parts
    cuts = cdiv(call.key.shape[2] - query.shape[2], call.block_size)
    # Before the pairs take their memory, because sorting needs some of its own.
    runtime |= in_order(*_parts_of(call, cuts))
    launch_fixed(
        ("pair gradients of a rank", *call.options),
        runtime,
        device,
        lambda: _write_pairs(call, constant_args(call, **strides), cuts),
    )
    of_alpha, of_offset = (side.sum(-1).view(batch, heads, 1, 1) for side in scalars)
    return dq, dk, dv, of_alpha, of_offset, dlog_mass, dcentroid, dcentre


def _write_pairs(call: KeysCall, values: dict[str, Any], cuts: int) -> Recipe:
    """Add blocks and chosen rows to dq, and write dk and dv."""
    batch, key_heads, rows, _ = call.key.shape
    share, each = call.query.shape[1] // key_heads, heads_at_once(call)
    values["G"] = call.indices.shape[2]
    # The kernel of the rows counts those behind the tokens.
    own = {"S": rows - call.query.shape[2], "parts": cuts, "BP": rows_at_once(call)}
    own |= {"STAGES": STAGES["key"], **SORTED_PAIRS}
    number = warps("key", values)
    grid = (call.blocks * batch * key_heads,)
    steps = [Step(triton_sharded_keys.keys_own_kernel, grid, values, number)]
    for first in range(0, batch * key_heads, each):
        count = min(each, batch * key_heads - first)
        steps.append(far_step(values, first * share, count * share))
        if cuts:
            some = values | own | {"first_head": first}
            kernel = triton_sharded_keys.keys_rows_kernel
            steps.append(Step(kernel, (cuts * count,), some, number))
    return Recipe(steps, pair_memory(call))


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
