"""The slots of attention with exact keys from tensors to kernels: summary, sums of gradients.

Dimension legend: see `lln.kernels.keys.launch_keys`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.kernels.keys import triton_keys_grad as keys_grad
from lln.kernels.keys import triton_keys_slots as keys_slots
from lln.kernels.keys.keys_call import KeysCall, Summary
from lln.kernels.keys.keys_sizes import slot_tile, warps
from lln.kernels.launching.limits import multiprocessors
from lln.kernels.launching.recipes import Recipe, Step, Workspace, over_tiles
from lln.kernels.launching.sizes import Sizes
from lln.kernels.launching.stretches import cdiv
from lln.kernels.summaries.lln_call import LLNCall, constant_args, launch_call, runtime_args

# Programs of the gradients per multiprocessor.
SLOT_PROGRAMS = 8
# Slots that a program merges or gathers.
ROWS = 8


def summarise(call: KeysCall) -> Summary:
    """Log-mass ``[B, SH, D]``, centroid ``[B, SH, D, E]`` and mean key ``[B, SH, D]``."""
    query, value, slots = call.query, call.value, call.summary_heads
    shape = (query.shape[0], slots, query.shape[3])
    # Two tensors: an operator may not return two views of one.
    log_mass, centre = (torch.zeros(shape, device=query.device) for _ in range(2))
    centroid = torch.empty((*shape, value.shape[3]), dtype=value.dtype, device=query.device)
    if centroid.numel() == 0 or value.shape[2] == 0:
        return log_mass, centroid.zero_(), centre
    as_lln = call.as_lln
    runtime = runtime_args(as_lln, query, slots)
    runtime["p_log_mass"], runtime["p_centroid"], runtime["p_centre"] = log_mass, centroid, centre
    runtime["p_held"] = call.masking[2]
    launch_call("slots", as_lln, runtime, slots, _write_summarise)
    return log_mass, centroid, centre


def _write_summarise(call: LLNCall, runtime: dict[str, Any], chosen: Sizes) -> Recipe:
    slots, keys = call.summary_heads, call.key.shape[2]
    values = constant_args(call, chosen, runtime, slots, max(chosen.width, chosen.value_width))
    programs = call.query.shape[0] * slots
    tile = chosen.summarise
    stretch = tile.stretch(keys, tile.tokens, programs, chosen.cores, parts=True)
    splits = cdiv(keys, stretch)
    values |= {"program_tokens": stretch, "splits": splits, "ROWS": ROWS}
    values["EVEN"] = call.mask is None and keys % tile.tokens == 0
    part = (programs, splits, chosen.width)
    workspace: Workspace = {name: (part, torch.float32) for name in ("p_peak", "p_mass", "p_total")}
    workspace["p_sum"] = (*part, chosen.value_width), torch.float32
    summary = over_tiles(keys_slots.keys_summary_kernel, (splits, programs), values, tile)
    merge = Step(keys_slots.keys_merge_kernel, (chosen.width // ROWS, programs), values, 4)
    return Recipe([summary, merge], workspace)


def gradient_parts(call: KeysCall) -> tuple[dict[str, Tensor], Tensor]:
    """Memory for what every program adds to the slots' gradients, by its names in the kernels.

    dC, dL and the rows' share of dμ ``[B·H, splits, …]``; then dα and doffset, which are also the
    second result, in one tensor ``[2, B·H, splits]``.
    """
    (batch, heads, _, width), value_width = call.query.shape, call.value.shape[3]
    device, parts = call.query.device, (batch * heads, _cut(call)[0])
    dc = torch.empty((*parts, width, value_width), device=device)
    dl, dm = torch.empty((2, *parts, width), device=device)
    scalars = torch.empty((2, *parts), device=device)
    named = {"p_dc_parts": dc, "p_dl_parts": dl, "p_dm_parts": dm}
    return named | {"p_dalpha_parts": scalars[0], "p_doffset_parts": scalars[1]}, scalars


def gradient_step(call: KeysCall, values: dict[str, Any]) -> Step:
    """Write δ, the slots' share of dq, and `gradient_parts`."""
    (batch, heads, tokens), (rows, stages) = call.query.shape[:3], slot_tile(call)
    splits, stretch = _cut(call)
    own = {"splits": splits, "stretch": stretch, "BM": rows, "STAGES": stages}
    own["EVEN"] = call.mask is None and tokens % rows == 0
    grid = (batch * heads * splits,)
    return Step(keys_grad.keys_slot_kernel, grid, values | own, warps(values))


def _cut(call: KeysCall) -> tuple[int, int]:
    """Into how many stretches the slots' gradients cut a head, and tokens per stretch."""
    (batch, heads, tokens), rows = call.query.shape[:3], slot_tile(call)[0]
    # With a mask the first block may begin before the first token.
    tiles = cdiv(tokens if call.mask is None else call.blocks * call.block_size, rows)
    programs = SLOT_PROGRAMS * multiprocessors(call.query.device)
    stretch = cdiv(tiles, min(tiles, max(1, programs // (batch * heads))))
    return cdiv(tiles, stretch), stretch * rows


def gathered_gradients(call: KeysCall) -> dict[str, Tensor]:
    """Memory for the sums of `gradient_parts`, by its names in the kernels.

    dC ``[B·SH, D, E]`` as the values, dL ``[B·H, D]``, the shift of every token of a slot
    ``[B·SH, D]``, and what every key gets through the mean key, likewise.
    """
    (batch, heads, _, width), device = call.query.shape, call.query.device
    programs = batch * call.summary_heads
    shape = (programs, width, call.value.shape[3])
    dc = torch.empty(shape, dtype=call.value.dtype, device=device)
    dl = torch.empty((batch * heads, width), device=device)
    shift, dcentre = torch.empty((2, programs, width), device=device)
    return {"p_dc": dc, "p_dl": dl, "p_shift": shift, "p_dcentre": dcentre}


def gather_step(call: KeysCall, values: dict[str, Any]) -> Step:
    """Sum `gradient_parts`."""
    grid = (cdiv(values["D"], ROWS), call.query.shape[0] * call.summary_heads)
    own = {"splits": _cut(call)[0], "ROWS": ROWS}
    return Step(keys_slots.keys_gather_kernel, grid, values | own, 4)
