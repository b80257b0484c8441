"""Attention with exact keys from tensors to kernels: allocate, choose sizes, launch.

Dimension legend: B batch, H query heads, Hk key heads, SH summary heads, T tokens, D head width,
E value width, W tokens in a block, n blocks, G groups per head, K keys per group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.kernels.keys import triton_keys_grad as keys_grad
from lln.kernels.keys import triton_keys_read as keys_read
from lln.kernels.keys.keys_call import KeysCall, Summary
from lln.kernels.keys.keys_sizes import STAGES, constant_args, registers, rows_at_once, warps
from lln.kernels.keys.launch_slots import (
    gather_step,
    gathered_gradients,
    gradient_parts,
    gradient_step,
    summarise,
)
from lln.kernels.launching.recipes import Place, Recipe, Step, Workspace, launch_fixed
from lln.kernels.launching.shapes import output_like
from lln.kernels.launching.stretches import cdiv

# Pairs whose blocks a program finds.
PAIRS_AT_ONCE = 1024
# The pairs' gradients may take this share of the memory of query, key, value and their gradients.
PAIR_SHARE = 0.17
# What a kernel gets that takes the pairs of blocks in order.
SORTED_PAIRS = {"p_order": Place("p_pair_order"), "p_starts": Place("p_pair_starts")}
# What stands for the gradients of a summary where nobody looks at them.
NO_SUMMARY = dict.fromkeys(("p_dc", "p_shift", "p_dcentre", "p_dbeta_parts"), Place("p_delta"))


def attend_exact_keys(call: KeysCall) -> tuple[Tensor, ...]:
    """Output ``[B, H, T, E]``, and what the backward needs.

    That is: log-normalisers ``[B, H, T]``, the slots' levels ``[B, H, G]``, log-mass, centroid and
    mean key.
    """
    summary = summarise(call)
    return *read_keys(call, summary), *summary


def read_keys(call: KeysCall, summary: Summary) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-normalisers and the slots' levels, from log-mass, centroid and mean key."""
    query = call.query
    batch, heads, tokens, _ = query.shape
    out = output_like(query, call.value.shape[3])
    lse = torch.empty((batch, heads, tokens), device=query.device)
    levels = torch.empty((batch, heads, call.groups), device=query.device)
    if out.numel() == 0:
        return out, lse, levels

    def write() -> Recipe:
        values = constant_args(call, p_o=out)
        own = {"STAGES": STAGES["chosen"]}
        grid = (call.groups * batch * heads,)
        kernel = keys_read.keys_read_kernel
        return Recipe([Step(kernel, grid, values | own, warps(values))], {})

    runtime = call.runtime(p_o=out, p_lse=lse, p_level=levels) | named_summary(summary)
    launch_fixed(("read keys", *call.options), runtime, query.device, write)
    return out, lse, levels


def named_summary(summary: Summary) -> dict[str, Tensor]:
    """A summary by its names in the kernels."""
    return dict(zip(("p_log_mass", "p_centroid", "p_centre"), summary, strict=True))


def exact_keys_gradients(
    call: KeysCall, gradient: Tensor, out: Tensor, lse: Tensor, levels: Tensor, *summary: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value, and of α, β and the offset where they are tensors.

    The last three are ``[B, H, 1, 1]``; that of β has one entry per summary head. A summary from
    outside has no β: in its place come the gradients of log-mass, centroid and mean key in float32,
    that of the mean key without what log-mass holds of it.
    """
    query, device = call.query, call.query.device
    (batch, heads, _, width), slots = query.shape, call.summary_heads
    dq, dk, dv = (torch.empty_like(side) for side in (query, call.key, call.value))
    if query.numel() == 0:
        zero = torch.zeros((batch, heads, 1, 1), device=device)
        return dq, dk, dv, zero, zero[:, :slots], zero
    sides = {"p_o": out, "p_g": gradient, "p_dq": dq, "p_dk": dk, "p_dv": dv}
    runtime = call.runtime(p_lse=lse, p_delta=torch.empty_like(lse), **sides)
    runtime |= named_summary((summary[0], summary[1], summary[2]))
    parts, scalars = gradient_parts(call)
    is_own = call.outside is None
    gathered = gathered_gradients(call) if is_own else {}

    def write_slots() -> Recipe:
        values = constant_args(call, **sides)
        steps = [gradient_step(call, values)]
        return Recipe([*steps, gather_step(call, values)] if is_own else steps, {})

    of_slots = {**runtime, "p_level": levels, **parts, **gathered}
    launch_fixed(("slot gradients", *call.options), of_slots, device, write_slots)
    of_summary: list[Tensor] = []
    if not is_own:
        # Of all programs and query heads that read a summary; always in the same order.
        of_summary = [
            parts[name].view(batch, slots, -1, *parts[name].shape[2:]).sum(2)
            for name in ("p_dl_parts", "p_dc_parts", "p_dm_parts")
        ]
    del parts, of_slots
    dbeta = torch.empty((batch * slots, call.blocks if is_own else 0), device=device)
    # Before the pairs take their memory, because sorting needs some of its own.
    if is_own:
        runtime |= gathered | {"p_dbeta_parts": dbeta, **_sorted_pairs(call, runtime["p_gaps"])}
    else:
        runtime |= _in_order(*_parts_chosen(call))
    launch_fixed(
        ("pair gradients", *call.options),
        runtime,
        device,
        lambda: _write_pairs(call, constant_args(call, **sides)),
    )
    shape = (batch, heads, 1, 1)
    of_alpha = of_beta = of_offset = None
    if call.alpha is not None:
        of_alpha = scalars[0].sum(-1).view(shape)
    if call.offset is not None:
        of_offset = scalars[1].sum(-1).view(shape)
    if not is_own:
        return dq, dk, dv, of_alpha, of_offset, *of_summary
    if call.beta is not None:
        # β also stands before μ in the logits of the slots.
        through = gathered["p_dl"].view(batch, slots, -1, width).sum(2) * summary[2]
        of_beta = (dbeta.sum(-1).view(batch, slots) - through.sum(-1)).view(batch, slots, 1, 1)
    return dq, dk, dv, of_alpha, of_beta, of_offset


def _write_pairs(call: KeysCall, values: dict[str, Any]) -> Recipe:
    """Add blocks and chosen keys to dq, and write dk and dv."""
    (batch, key_heads, rows), tokens = call.key.shape[:3], call.query.shape[2]
    own = {"BP": rows_at_once(call), "STAGES": STAGES["key"], **SORTED_PAIRS, "ALONE": False}
    each, share = heads_at_once(call), call.query.shape[1] // key_heads
    steps, number = [], warps(values)
    kernel, parts, most = keys_grad.keys_key_kernel, call.blocks, registers(values)
    if call.outside is not None:
        values["G"] = call.indices.shape[2]
        alone = values | own | NO_SUMMARY | {"first_head": 0, "ALONE": True}
        steps.append(Step(kernel, (parts * batch * key_heads,), alone, number))
        # This kernel counts the rows behind the tokens.
        kernel, parts, most = keys_grad.keys_rows_kernel, call.rows_behind, 0
        own |= {"S": rows - tokens, "parts": parts}
    for first in range(0, batch * key_heads, each):
        count = min(each, batch * key_heads - first)
        far = values | {"first_head": first * share, "STAGES": STAGES["chosen"]}
        grid = (count * share * values["G"],)
        steps.append(Step(keys_grad.keys_far_kernel, grid, far, number))
        if parts:
            some = values | own | {"first_head": first}
            steps.append(Step(kernel, (parts * count,), some, number, most))
    return Recipe(steps, _pair_memory(call))


def _pair_memory(call: KeysCall) -> Workspace:
    """Where dk and dv of every (group, chosen key) of some heads go."""
    query, value_width = call.query, call.value.shape[3]
    share = query.shape[1] // call.key.shape[1]
    pairs = heads_at_once(call) * share * call.indices.shape[2] * call.indices.shape[3]
    return {
        "p_pair_dk": ((pairs, query.shape[3]), query.dtype),
        "p_pair_dv": ((pairs, value_width), query.dtype),
    }


def _sorted_pairs(call: KeysCall, gaps: Tensor) -> dict[str, Tensor]:
    """The pairs (group, chosen key) of all query heads, sorted by head and block of the key."""
    batch, heads, groups, keys = call.indices.shape
    device, pairs = call.query.device, groups * keys
    # Missing keys sort behind all others.
    last = batch * heads * call.blocks
    found = torch.empty(batch * heads * pairs, dtype=_short_dtype(last), device=device)

    def write() -> Recipe:
        values = {"H": heads, "pairs": pairs, "blocks": call.blocks, "last": last}
        values |= {"W": call.block_size, "BP": PAIRS_AT_ONCE, "HAS_MASK": call.mask is not None}
        grid = (cdiv(pairs, PAIRS_AT_ONCE), batch * heads)
        return Recipe([Step(keys_grad.pair_blocks_kernel, grid, values, 4)], {})

    if pairs:
        runtime = {"p_chosen": call.indices, "p_gaps": gaps, "p_block": found}
        launch_fixed(("blocks of pairs", *call.options), runtime, device, write)
    return _in_order(found, last)


def _in_order(blocks: Tensor, last: int) -> dict[str, Tensor]:
    """Which pair comes at every place, and where the pairs of every block of every head begin.

    It is asked with the block of every pair's key, counted over all heads, and how many there are,
    which is also that of pairs without a key.
    """
    ordered, order = blocks.sort(stable=True)
    starts = torch.arange(last + 1, device=blocks.device, dtype=blocks.dtype)
    starts = torch.searchsorted(ordered, starts, out_int32=True)
    return {"p_pair_order": order, "p_pair_starts": starts}


def _short_dtype(last: int) -> torch.dtype:
    """An integer dtype for numbers up to ``last``; short ones are sorted sooner."""
    return torch.int16 if last < 2**15 - 1 else torch.int32


def heads_at_once(call: KeysCall) -> int:
    """How many key heads the backward takes at once, to bound the memory of the pairs."""
    query, key = call.query, call.key
    width = query.shape[3] + call.value.shape[3]
    share = query.shape[1] // key.shape[1]
    numbers = share * call.indices.shape[2] * call.indices.shape[3] * width
    one = max(numbers * query.itemsize, 1)
    tensors = 2 * (query.nbytes + key.nbytes + call.value.nbytes)
    return min(max(1, int(tensors * PAIR_SHARE) // one), query.shape[0] * key.shape[1])


def _parts_chosen(call: KeysCall) -> tuple[Tensor, int]:
    """For every pair which W of the rows behind the tokens it chose, counted over all heads.

    The second result is the number of pairs without a key.
    """
    (batch, heads), cuts = call.indices.shape[:2], call.rows_behind
    last = batch * heads * cuts
    line = torch.arange(batch * heads, device=call.indices.device, dtype=torch.int32)
    part = (call.indices - call.query.shape[2]) // call.block_size
    part += line.view(batch, heads, 1, 1) * cuts
    return torch.where(call.indices < 0, last, part).flatten().to(_short_dtype(last)), last
