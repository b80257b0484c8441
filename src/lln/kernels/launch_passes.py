"""The passes of LLN attention as launches: which kernels a pass is made of.

A summary is the fixed-size state of keys and values (`lln.eager.summary`). Wide heads in 16-bit
types have kernels of their own (`lln.kernels.sizes.Sizes.is_turned`).

Dimension legend: see `lln.kernels.launch`.
"""

from __future__ import annotations

from typing import Any

import torch

from lln.kernels.recipes import Place, Room, Step, over_tiles
from lln.kernels.sizes import Sizes
from lln.kernels.triton import backward as bwd
from lln.kernels.triton import summaries, turned_grads, wide_summary


def summary_steps(
    programs: int, chosen: Sizes, values: dict[str, Any], splits: int
) -> tuple[list[Step], Room]:
    """Keys and values into ``p_log_mass`` and ``p_centroid``.

    Args:
        programs: Summaries of all samples.
        chosen: The sizes.
        values: The kernels' arguments.
        splits: Stretches of keys per summary.
    """
    if not chosen.is_turned:
        steps, room = summarise_steps(programs, chosen, values, splits)
        return [*steps, merge_step(programs, chosen, values, splits)], room
    whole, slots = splits == 1, chosen.summary_slots
    own: dict[str, Any] = {"WHOLE": whole, "SLOTS": slots}
    if whole:
        # Nothing is written there.
        own |= dict.fromkeys(("p_peak", "p_mass", "p_sum"), Place("p_log_mass"))
    grid = (splits * (chosen.width // slots), programs)
    kernel = wide_summary.summarise_slots_kernel
    steps = [over_tiles(kernel, grid, values, chosen.summarise, **own)]
    if whole:
        return steps, {}
    return [*steps, merge_step(programs, chosen, values, splits)], _partials(
        programs, chosen, splits
    )


def _partials(programs: int, chosen: Sizes, splits: int) -> Room:
    part = (programs, splits, chosen.width)
    return {
        "p_peak": (part, torch.float32),
        "p_mass": (part, torch.float32),
        "p_sum": ((*part, chosen.value_width), torch.float32),
    }


def summarise_steps(
    programs: int, chosen: Sizes, values: dict[str, Any], splits: int
) -> tuple[list[Step], Room]:
    """Partial summaries ``p_peak``, ``p_mass`` and ``p_sum`` of every stretch of keys."""
    kernel, grid = summaries.summarise_kernel, (splits, programs)
    steps = [over_tiles(kernel, grid, values, chosen.summarise)]
    return steps, _partials(programs, chosen, splits)


def merge_step(programs: int, chosen: Sizes, values: dict[str, Any], splits: int) -> Step:
    """Partial summaries into ``p_log_mass`` and ``p_centroid``."""
    rows = min(8, chosen.width)
    grid = (chosen.width // rows, programs)
    return Step(summaries.merge_kernel, grid, values | {"splits": splits, "ROWS": rows}, 4)


def query_grad_steps(
    heads: int, chosen: Sizes, values: dict[str, Any], splits: int
) -> tuple[list[Step], Room]:
    """Queries and dO into dq, ``p_shift`` and ``p_dc``.

    Args:
        heads: Query heads of all samples.
        chosen: The sizes.
        values: The kernels' arguments.
        splits: Stretches of queries per head.
    """
    parts, grid, tile = values["R"] * splits, (splits, heads), chosen.query_grad
    if chosen.is_turned and parts == 1:
        own = {"OUT_D": values["D"], "OUT_E": values["E"]}
        own |= {"p_shift_out": Place("p_shift"), "p_dc_out": Place("p_dc")}
        return [over_tiles(turned_grads.query_turned_kernel, grid, values, tile, **own)], {}
    part = (heads, splits, chosen.width)
    room: Room = {
        "p_shift_parts": (part, torch.float32),
        "p_dc_parts": ((*part, chosen.value_width), torch.float32),
    }
    if chosen.is_turned:
        own = {"OUT_D": chosen.width, "OUT_E": chosen.value_width}
        own |= {"p_shift_out": Place("p_shift_parts"), "p_dc_out": Place("p_dc_parts")}
        step = over_tiles(turned_grads.query_turned_kernel, grid, values, tile, **own)
    else:
        step = over_tiles(bwd.query_bwd_kernel, grid, values, tile)
    rows = min(8, chosen.value_width)
    grid = (chosen.value_width // rows, heads // values["R"])
    gather = Step(bwd.gather_kernel, grid, values | {"parts": parts, "ROWS": rows}, 4)
    return [step, gather], room


def key_grad_step(programs: int, chosen: Sizes, values: dict[str, Any], splits: int) -> Step:
    """Keys, values, ``p_shift`` and ``p_dc`` into dk and dv, without a diagonal part."""
    kernel = turned_grads.key_turned_kernel if chosen.is_turned else bwd.key_bwd_kernel
    return over_tiles(kernel, (splits, programs), values, chosen.key_grad)
