"""Softmax inside a sliding window, from tensors to kernels.

Dimension legend: see `lln.kernels.blocks.triton_window`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.kernels.blocks import triton_window as kernels
from lln.kernels.launching.kernel_arguments import mask_bytes, precision_of, strides_of
from lln.kernels.launching.recipes import Recipe, Step, launch_cached, over_tiles
from lln.kernels.launching.shapes import layout_of, output_like
from lln.kernels.launching.sizes import Sizes, choose_sizes
from lln.kernels.launching.stretches import Tile, cdiv


class WindowCall(NamedTuple):
    """One call.

    Attributes:
        query: ``[B, H, T, D]``.
        key: ``[B, HK, T, D]``.
        value: ``[B, HK, T, E]``.
        mask: bool ``[B, T]`` or None.
        places: int32 ``[T]`` or None; see `lln.kernels.blocks.window_ops.fused_window`.
        window: Tokens on a side.
        scale: Factor of the scores.
        causal: Whether a row sees only its own and earlier tokens.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    places: Tensor | None
    window: int
    scale: float
    causal: bool


def attend_window(call: WindowCall) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, T, E]``, and log₂ of every row's normaliser ``[B, H, T]``."""
    out = output_like(call.query, call.value.shape[3])
    norm = torch.empty(call.query.shape[:3], dtype=torch.float32, device=call.query.device)
    if out.numel() > 0:
        steps = [(kernels.window_fwd_kernel, "window_read", call.query)]
        _launch("window", call, {"p_o": out}, {"p_norm": norm}, steps)
    return out, norm


def window_gradients(
    call: WindowCall, out: Tensor, norm: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    dq, dk, dv = (torch.empty_like(side) for side in (call.query, call.key, call.value))
    if gradient.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    sides = {"p_o": out, "p_g": gradient, "p_dq": dq, "p_dk": dk, "p_dv": dv}
    steps = [
        (kernels.window_query_kernel, "window_query", call.query),
        (kernels.window_key_kernel, "window_key", call.key),
    ]
    rows = {"p_norm": norm, "p_level": torch.empty_like(norm)}
    _launch("window backward", call, sides, rows, steps)
    return dq, dk, dv


def _launch(
    name: str,
    call: WindowCall,
    sides: dict[str, Tensor],
    rows: dict[str, Tensor],
    steps: list[tuple[Any, str, Tensor]],
) -> None:
    """Run the launches of a pass.

    Args:
        name: The pass.
        call: What to compute.
        sides: Its tensors ``[B, H, T, channels]`` besides query, key and value, by their names in
            the kernels.
        rows: Those of one number per row.
        steps: Kernels, the names of their tiles in `Sizes`, and the side whose heads they go over.
    """
    query, key, value = call.query, call.key, call.value
    tensors = {"p_q": query, "p_k": key, "p_v": value, **sides}
    layouts = tuple([layout_of(side) for side in (*tensors.values(), call.mask, call.places)])
    kind = (name, query.device, layouts, call.window, call.scale, call.causal)
    family = (name, query.device, query.dtype, query.shape[3], value.shape[3])

    def choose() -> Sizes:
        return choose_sizes(query, key, value, query.shape[0], key.shape[1], 0)

    def write(chosen: Sizes) -> Recipe:
        values = {
            "T": query.shape[2],
            "H": query.shape[1],
            "HK": key.shape[1],
            "R": query.shape[1] // key.shape[1],
            "D": query.shape[3],
            "E": value.shape[3],
            "BD": chosen.width,
            "BE": chosen.value_width,
            "scale": call.scale,
            "window": call.window,
            "CAUSAL": call.causal,
            "HAS_MASK": call.mask is not None,
            "PACKED": call.places is not None,
            "PRECISION": precision_of(query, chosen.width),
            **strides_of(False, **tensors),
        }
        made = [_step(kernel, getattr(chosen, tile), side, values) for kernel, tile, side in steps]
        return Recipe(made, {})

    # Where there is none, anything that has an address.
    places = query if call.places is None else call.places
    runtime = {**tensors, **rows, "p_mask": mask_bytes(call.mask, query), "p_places": places}
    launch_cached(kind, family, runtime, query.device, choose, write)


def _step(kernel: Any, tile: Tile, side: Tensor, values: dict[str, Any]) -> Step:
    """A launch over all tiles of a side's heads."""
    tiles = cdiv(side.shape[2], tile.tokens)
    own = {"tiles": tiles, "BS": tile.across}
    return over_tiles(kernel, (tiles * side.shape[0] * side.shape[1],), values, tile, **own)
