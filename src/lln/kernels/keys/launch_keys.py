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
        return Recipe([Step(kernel, grid, values | own, warps("read", values))], {})

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

    The last three are ``[B, H, 1, 1]``; that of β has one entry per summary head.
    """
    query, key, value = call.query, call.key, call.value
    batch, heads, _, width = query.shape
    log_mass, centroid, centre = summary
    slots, device = log_mass.shape[1], query.device
    dq, dk, dv = (torch.empty_like(side) for side in (query, key, value))
    if query.numel() == 0:
        zero = torch.zeros((batch, heads, 1, 1), device=device)
        return dq, dk, dv, zero, zero[:, :slots], zero
    runtime = call.runtime(p_g=gradient, p_o=out, p_lse=lse, p_dq=dq, p_dk=dk, p_dv=dv)
    runtime |= named_summary((log_mass, centroid, centre)) | {"p_delta": torch.empty_like(lse)}
    strides = {"p_o": out, "p_g": gradient, "p_dq": dq, "p_dk": dk, "p_dv": dv}
    gathered = gathered_gradients(call)
    parts, scalars = gradient_parts(call)

    def write_slots() -> Recipe:
        values = constant_args(call, **strides)
        return Recipe([gradient_step(call, values), gather_step(call, values)], {})

    of_slots = {**runtime, "p_level": levels, **parts, **gathered}
    launch_fixed(("slot gradients", *call.options), of_slots, device, write_slots)
    del parts, of_slots
    dbeta = torch.empty((batch * slots, call.blocks), device=device)
    runtime |= gathered | {"p_dbeta_parts": dbeta}
    # Before the pairs take their memory, because sorting needs some of its own.
    runtime |= _sorted_pairs(call, runtime["p_gaps"])
    launch_fixed(
        ("pair gradients", *call.options),
        runtime,
        device,
        lambda: _write_pairs(call, constant_args(call, **strides)),
    )
    shape = (batch, heads, 1, 1)
    of_alpha = of_beta = of_offset = None
    if call.alpha is not None:
        of_alpha = scalars[0].sum(-1).view(shape)
    if call.offset is not None:
        of_offset = scalars[1].sum(-1).view(shape)
    if call.beta is not None:
        # β also stands before μ in the logits of the slots.
        through = gathered["p_dl"].view(batch, slots, -1, width).sum(2) * centre
        of_beta = (dbeta.sum(-1).view(batch, slots) - through.sum(-1)).view(batch, slots, 1, 1)
    return dq, dk, dv, of_alpha, of_beta, of_offset


def _write_pairs(call: KeysCall, values: dict[str, Any]) -> Recipe:
    batch, key_heads = call.key.shape[:2]
    own = {"BP": rows_at_once(call), "STAGES": STAGES["key"], **SORTED_PAIRS}
    each, share = heads_at_once(call), call.query.shape[1] // key_heads
    steps = []
    for first in range(0, batch * key_heads, each):
        count = min(each, batch * key_heads - first)
        steps.append(far_step(values, first * share, count * share))
        some = values | own | {"first_head": first}
        grid, number = (call.blocks * count,), warps("key", values)
        steps.append(Step(keys_grad.keys_key_kernel, grid, some, number, registers(values)))
    return Recipe(steps, pair_memory(call))


def pair_memory(call: KeysCall) -> Workspace:
    """Where dk and dv of every (group, chosen key) of some heads go."""
    query, value_width = call.query, call.value.shape[3]
    share = query.shape[1] // call.key.shape[1]
    pairs = heads_at_once(call) * share * call.indices.shape[2] * call.indices.shape[3]
    return {
        "p_pair_dk": ((pairs, query.shape[3]), query.dtype),
        "p_pair_dv": ((pairs, value_width), query.dtype),
    }


def far_step(values: dict[str, Any], first: int, count: int) -> Step:
    """Add block and chosen keys to dq of ``count`` query heads from ``first`` on."""
    own = {"first_head": first, "STAGES": STAGES["chosen"]}
    grid = (count * values["G"],)
    return Step(keys_grad.keys_far_kernel, grid, values | own, warps("far", values))


def _sorted_pairs(call: KeysCall, gaps: Tensor) -> dict[str, Tensor]:
    """The pairs (group, chosen key) of all query heads, sorted by head and block of the key."""
    batch, heads, groups, keys = call.indices.shape
    device, pairs = call.query.device, groups * keys
    # Missing keys sort behind all others.
    last = batch * heads * call.blocks
    found = torch.empty(batch * heads * pairs, dtype=short_dtype(last), device=device)

    def write() -> Recipe:
        values = {"H": heads, "pairs": pairs, "blocks": call.blocks, "last": last}
        values |= {"W": call.block_size, "BP": PAIRS_AT_ONCE, "HAS_MASK": call.mask is not None}
        grid = (cdiv(pairs, PAIRS_AT_ONCE), batch * heads)
        return Recipe([Step(keys_grad.pair_blocks_kernel, grid, values, 4)], {})

    if pairs:
        runtime = {"p_chosen": call.indices, "p_gaps": gaps, "p_block": found}
        launch_fixed(("blocks of pairs", *call.options), runtime, device, write)
    return in_order(found, last)


def in_order(blocks: Tensor, last: int) -> dict[str, Tensor]:
    """Which pair comes at every place, and where the pairs of every block of every head begin.

    Args:
        blocks: The block of every pair's key, counted over all heads.
        last: How many blocks there are; also that of pairs without a key.
    """
    ordered, order = blocks.sort(stable=True)
    starts = torch.arange(last + 1, device=blocks.device, dtype=blocks.dtype)
    starts = torch.searchsorted(ordered, starts, out_int32=True)
    return {"p_pair_order": order, "p_pair_starts": starts}


def short_dtype(last: int) -> torch.dtype:
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
