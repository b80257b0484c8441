"""Block-diagonal attention tile by tile, from tensors to kernels: for blocks longer than a tile.

It stands alone, or is added in place to what LLN attention has written, so that LLN + Diag needs no
memory for either part.

Dimension legend: see `lln.kernels.blocks.triton_tiled_blocks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lln.kernels.blocks import triton_tiled_blocks as kernels
from lln.kernels.blocks.launch_blocks import BlockCall
from lln.kernels.launching.recipes import Recipe, Step, Workspace, launch_cached, over_tiles
from lln.kernels.launching.shapes import layout_of, output_like
from lln.kernels.launching.sizes import Sizes
from lln.kernels.launching.stretches import Tile, cdiv


def attend_tiled_blocks(call: BlockCall) -> Tensor:
    """Output ``[B, H, T, E]``."""
    out = output_like(call.query, call.value.shape[3])
    add_blocks(call, out, None)
    return out


def tiled_blocks_gradients(call: BlockCall, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    made = tuple(torch.empty_like(side) for side in (call.query, call.key, call.value))
    add_gradients(call, gradient, made, None)
    return made[0], made[1], made[2]


def add_blocks(call: BlockCall, out: Tensor, mix: float | None) -> None:
    """Make of ``out`` mix · out + (1 − mix) · blocks; None = of the blocks alone."""

    def write(chosen: Sizes, values: dict[str, Any]) -> Recipe:
        step = _step(kernels.tiled_fwd_kernel, call, chosen.tiled_read, call.query, values)
        return Recipe([step], {})

    _launch("tiled", call, {"p_o": out}, mix, write)


def add_gradients(
    call: BlockCall, gradient: Tensor, made: tuple[Tensor, ...], mix: float | None
) -> None:
    """The same with the gradients ``made`` of query, key and value."""
    batch, heads, tokens, _ = call.query.shape
    rows: Workspace = dict.fromkeys(("p_norm", "p_level"), ((batch, heads, tokens), torch.float32))

    def write(chosen: Sizes, values: dict[str, Any]) -> Recipe:
        steps = [
            _step(kernels.tiled_query_kernel, call, chosen.tiled_query, call.query, values),
            _step(kernels.tiled_value_kernel, call, chosen.tiled_value, call.key, values),
            _step(kernels.tiled_key_kernel, call, chosen.tiled_key, call.key, values),
        ]
        return Recipe(steps, rows)

    dq, dk, dv = made
    others = {"p_g": gradient, "p_dq": dq, "p_dk": dk, "p_dv": dv}
    _launch("tiled backward", call, others, mix, write)


def _launch(
    name: str,
    call: BlockCall,
    others: dict[str, Tensor],
    mix: float | None,
    write: Callable[[Sizes, dict[str, Any]], Recipe],
) -> None:
    """Run the launches of a pass.

    Args:
        name: The pass.
        call: What to compute.
        others: Its tensors besides query, key and value, by their names in the kernels.
        mix: See `add_blocks`.
        write: Makes the recipe from sizes and the arguments that calls of one kind share.
    """
    query, key, value = call.query, call.key, call.value
    if query.numel() == 0 or value.numel() == 0:
        for made in others.values():
            made.zero_()
        return
    tensors = {"p_q": query, "p_k": key, "p_v": value, **others}
    layouts = tuple([layout_of(tensor) for tensor in tensors.values()])
    options = (call.block_size, call.scale, call.causal, mix is None)

    def write_for(chosen: Sizes) -> Recipe:
        return write(chosen, call.values(chosen, **tensors) | {"ADDS": mix is not None})

    kind = (name, query.device, layouts, options)
    family = (name, query.device, query.dtype, query.shape[3], value.shape[3])
    runtime = {**tensors, "mix": 0.0 if mix is None else mix}
    launch_cached(
        kind, (*family, call.block_size > 64), runtime, query.device, call.sizes, write_for
    )


def _step(kernel: Any, call: BlockCall, tile: Tile, side: Tensor, values: dict[str, Any]) -> Step:
    """A launch over all tiles of a side's heads."""
    tiles, tokens = cdiv(call.block_size, tile.tokens), side.shape[2]
    programs = tiles * cdiv(tokens, call.block_size)
    longer = max(tile.tokens, tile.across)
    # Sizes are powers of two: what fits the longer one fits both.
    even = call.block_size % longer == 0 and tokens % call.block_size == 0
    own = {"tiles": tiles, "programs": programs, "BS": tile.across, "EVEN": even}
    return over_tiles(kernel, (programs * side.shape[0] * side.shape[1],), values, tile, **own)
