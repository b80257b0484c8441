"""One token at a time, from tensors to the kernel.

Dimension legend: see `lln.kernels.summaries.triton_decode`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.kernels.launching.kernel_arguments import flat_scale
from lln.kernels.launching.recipes import Recipe, Step, launch_heads
from lln.kernels.launching.shapes import layout_of
from lln.kernels.launching.sizes import Sizes
from lln.kernels.launching.stretches import cdiv
from lln.kernels.summaries.triton_decode import decode_kernel

# Channels per program; the slots' weights are recomputed for every such slice.
_SLICE = 64


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_mass: Tensor,
    centroid: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    alpha_number: float,
    beta_number: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[B, H, 1, E]``, and the log-mass and centroid including the token."""
    batch, heads = query.shape[:2]
    slots, value_width = centroid.shape[1], value.shape[3]
    out = query.new_empty(batch, heads, 1, value_width)
    new_log_mass, new_centroid = torch.empty_like(log_mass), torch.empty_like(centroid)
    if out.numel() == 0:
        return out, new_log_mass, new_centroid
    alpha_flat, beta_flat = flat_scale(alpha, batch, query), flat_scale(beta, batch, query)
    sides = {"p_q": query, "p_k": key, "p_v": value, "p_o": out}
    runtime = {
        "p_alpha": alpha_flat,
        "p_beta": beta_flat,
        "p_log_mass": log_mass,
        "p_centroid": centroid,
        "p_new_log_mass": new_log_mass,
        "p_new_centroid": new_centroid,
        "alpha": alpha_number,
        "beta": beta_number,
    }
    layouts = [layout_of(side) for side in (alpha_flat, beta_flat, log_mass, centroid)]

    def write(chosen: Sizes, values: dict[str, Any]) -> Recipe:
        part = min(chosen.value_width, _SLICE)
        values |= {"SH": slots, "R": heads // slots, "KG": slots // key.shape[1], "BE": part}
        values |= {"HAS_ALPHA": alpha is not None, "HAS_BETA": beta is not None}
        grid = (batch * slots, cdiv(value_width, part))
        return Recipe([Step(decode_kernel, grid, values, 4)], {})

    options = (*layouts, alpha is None, beta is None)
    launch_heads("decode", sides, runtime, options, (), write)
    return out, new_log_mass, new_centroid
