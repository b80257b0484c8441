"""The passes of LLN attention as launches: which kernels a pass is made of.

A summary is the fixed-size state of keys and values (`lln.eager.summary`). Wide heads in 16-bit
types have kernels of their own (`lln.kernels.launching.sizes.Sizes.is_slot_major`).

Dimension legend: see `lln.kernels.lln.launch_bidirectional`.
"""

from __future__ import annotations

from typing import Any

import torch

from lln.kernels.launching.recipes import Place, Step, Workspace, over_tiles
from lln.kernels.launching.sizes import Sizes
from lln.kernels.launching.stretches import cdiv
from lln.kernels.summaries import triton_backward as bwd
from lln.kernels.summaries import (
    triton_summaries,
    triton_wide_queries,
    triton_wide_summary,
)
from lln.kernels.summaries.triton_slot_major_grads import key_slot_major_kernel

# What a kernel gets that takes a finished summary, or finished gradients of one.
WHOLE_SUMMARY = {
    **dict.fromkeys(("p_peak", "p_mass", "p_sum"), Place("p_log_mass")),
    **{"parts": 1, "FOLDS": False},
}
WHOLE_GRADIENT = {
    **dict.fromkeys(("p_shift_parts", "p_dc_parts"), Place("p_shift")),
    **{"parts": 1, "FOLDS": False},
}


def summary_steps(
    programs: int, chosen: Sizes, values: dict[str, Any], splits: int, folds: bool = False
) -> tuple[list[Step], Workspace]:
    """Keys and values into ``p_log_mass`` and ``p_centroid``, for so many summaries of all samples.

    Each has ``splits`` stretches of keys; with ``folds`` the next pass takes their partial
    summaries.
    """
    if not chosen.is_slot_major:
        steps, workspace = summarise_steps(programs, chosen, values, splits)
        return steps if folds else [*steps, merge_step(programs, chosen, values, splits)], workspace
    whole = splits == 1
    own: dict[str, Any] = {"WHOLE": whole, "SLOTS": chosen.summary_slots}
    if whole:
        # Nothing is written there.
        own |= dict.fromkeys(("p_peak", "p_mass", "p_sum"), Place("p_log_mass"))
    grid = (splits * summary_shares(chosen), programs)
    kernel = triton_wide_summary.summarise_slots_kernel
    steps = [over_tiles(kernel, grid, values, chosen.summarise, **own)]
    if whole:
        return steps, {}
    return [*steps, merge_step(programs, chosen, values, splits)], _partials(
        programs, chosen, splits
    )


def summary_shares(chosen: Sizes) -> int:
    """Programs that share a stretch of keys: those of wide heads compute some of the slots."""
    return chosen.width // chosen.summary_slots if chosen.is_slot_major else 1


def _partials(programs: int, chosen: Sizes, splits: int) -> Workspace:
    part = (programs, splits, chosen.width)
    return {
        "p_peak": (part, torch.float32),
        "p_mass": (part, torch.float32),
        "p_sum": ((*part, chosen.value_width), torch.float32),
    }


def summarise_steps(
    programs: int, chosen: Sizes, values: dict[str, Any], splits: int
) -> tuple[list[Step], Workspace]:
    """Partial summaries ``p_peak``, ``p_mass`` and ``p_sum`` of every stretch of keys."""
    kernel, grid = triton_summaries.summarise_kernel, (splits, programs)
    steps = [over_tiles(kernel, grid, values, chosen.summarise)]
    return steps, _partials(programs, chosen, splits)


def merge_step(programs: int, chosen: Sizes, values: dict[str, Any], splits: int) -> Step:
    """Partial summaries into ``p_log_mass`` and ``p_centroid``."""
    rows = min(8, chosen.width)
    grid = (chosen.width // rows, programs)
    return Step(triton_summaries.merge_kernel, grid, values | {"parts": splits, "ROWS": rows}, 4)


def query_grad_steps(
    heads: int, chosen: Sizes, values: dict[str, Any], splits: int, folds: bool = False
) -> tuple[list[Step], Workspace]:
    """Queries and dO into dq, ``p_shift`` and ``p_dc``, for so many query heads of all samples.

    Each has ``splits`` stretches; with ``folds`` the next pass takes every stretch's part of shift
    and dC.
    """
    if chosen.is_slot_major:
        return _wide_query_steps(heads, chosen, values, splits)
    grid = (splits, heads)
    step = over_tiles(bwd.query_bwd_kernel, grid, values, chosen.query_grad)
    gather, workspace = _gather(heads, chosen, values, splits)
    return [step] if folds else [step, gather], workspace


def _wide_query_steps(
    heads: int, chosen: Sizes, values: dict[str, Any], splits: int
) -> tuple[list[Step], Workspace]:
    """The same for wide heads, in two passes; the second has its own stretches."""
    rows, tile = chosen.query_grad, chosen.slot_grad
    steps = [over_tiles(triton_wide_queries.query_rows_kernel, (splits, heads), values, rows)]
    tokens = splits * values["program_tokens"]
    shares = chosen.width // chosen.summary_slots
    stretch = tile.stretch(tokens, tile.tokens, heads, chosen.cores, shares, parts=True)
    splits = cdiv(tokens, stretch)
    whole = values["R"] * splits == 1
    ends = ("", values["D"], values["E"]) if whole else ("_parts", chosen.width, chosen.value_width)
    suffix, out_width, out_channels = ends
    own = {"program_tokens": stretch, "SLOTS": chosen.summary_slots}
    own |= {"OUT_D": out_width, "OUT_E": out_channels}
    own |= {f"p_{name}_out": Place(f"p_{name}{suffix}") for name in ("shift", "dc")}
    grid = (splits * shares, heads)
    steps.append(over_tiles(triton_wide_queries.slot_grad_kernel, grid, values, tile, **own))
    # Packed sequences lie in one sample.
    count = (values["H"] if values["PACKED"] else heads) * values["T"]
    workspace: Workspace = dict.fromkeys(("p_z", "p_mean"), ((count,), torch.float32))
    if whole:
        return steps, workspace
    gather, parts = _gather(heads, chosen, values, splits)
    return [*steps, gather], workspace | parts


def _gather(
    heads: int, chosen: Sizes, values: dict[str, Any], splits: int
) -> tuple[Step, Workspace]:
    """Every stretch's part of shift and dC into their sums, and the memory of the parts."""
    part = (heads, splits, chosen.width)
    workspace: Workspace = {
        "p_shift_parts": (part, torch.float32),
        "p_dc_parts": ((*part, chosen.value_width), torch.float32),
    }
    rows = min(8, chosen.value_width)
    grid = (chosen.value_width // rows, heads // values["R"])
    own = {"parts": values["R"] * splits, "ROWS": rows}
    return Step(bwd.gather_kernel, grid, values | own, 4), workspace


def key_grad_step(programs: int, chosen: Sizes, values: dict[str, Any], splits: int) -> Step:
    """Keys, values, ``p_shift`` and ``p_dc`` into dk and dv, without a diagonal part."""
    kernel = key_slot_major_kernel if chosen.is_slot_major else bwd.key_bwd_kernel
    return over_tiles(kernel, (splits, programs), values, chosen.key_grad)
