"""The slots of attention with exact keys from tensors to kernels: summary, sums of gradients.

Dimension legend: see `lln.kernels.keys.launch_keys`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.kernels.keys import triton_keys_slots as keys_slots
from lln.kernels.keys.keys_call import KeysCall
from lln.kernels.keys.launch_choice import launch
from lln.kernels.launching.limits import power_of_two
from lln.kernels.launching.recipes import (
    Recipe,
    Step,
    Workspace,
    launch_cached,
    on_device,
    over_tiles,
)
from lln.kernels.launching.sizes import Sizes
from lln.kernels.launching.stretches import cdiv
from lln.kernels.summaries.lln_call import constant_args, runtime_args

# Slots that a program merges or gathers.
ROWS = 8


def summarise(call: KeysCall) -> tuple[Tensor, Tensor, Tensor]:
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
    launch_cached(
        ("slots", as_lln.layout_key(), as_lln.options()),
        as_lln.family("slots"),
        runtime,
        query.device,
        lambda: as_lln.sizes(slots),
        lambda chosen: _write_summarise(call, runtime, chosen),
    )
    return log_mass, centroid, centre


def _write_summarise(call: KeysCall, runtime: dict[str, Any], chosen: Sizes) -> Recipe:
    as_lln, slots, keys = call.as_lln, call.summary_heads, call.key.shape[2]
    values = constant_args(as_lln, chosen, runtime, slots, max(chosen.width, chosen.value_width))
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


def gather(
    call: KeysCall, parts: tuple[Tensor, Tensor, Tensor], centroid: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum the partial dC, dL and rows' share of dμ ``[B·H, splits, …]``.

    Returns:
        dC ``[B·SH, D, E]`` as the values, dL ``[B·H, D]``, the shift of every token of a slot
        ``[B·SH, D]``, and what every key gets through the mean key, likewise.
    """
    dc_parts = parts[0]
    lines, splits, width, value_width = dc_parts.shape
    slots, device = call.summary_heads, dc_parts.device
    programs = call.query.shape[0] * slots
    dc = torch.empty((programs, width, value_width), dtype=call.value.dtype, device=device)
    dl = torch.empty((lines, width), device=device)
    shift, dcentre = torch.empty((2, programs, width), device=device)
    with on_device(device):
        launch(
            keys_slots.keys_gather_kernel, (cdiv(width, ROWS), programs),
            *parts, centroid, call.masking[2], call.flat_beta, dc, dl, shift, dcentre,
            call.beta_number, call.key.shape[2], slots, splits,
            SR=lines // programs, D=width, E=value_width, BE=max(16, power_of_two(value_width)),
            ROWS=ROWS, HAS_BETA=call.beta is not None, HAS_MASK=call.mask is not None, num_warps=4,
        )  # fmt: skip
    return dc, dl, shift, dcentre
