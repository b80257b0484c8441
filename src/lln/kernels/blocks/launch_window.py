"""Softmax inside a sliding window or inside blocks, tile by tile, from tensors to kernels.

Blocks stand alone, or are added in place to what LLN attention has written, so that LLN + Diag
keeps neither part apart.

Dimension legend: see `lln.kernels.blocks.triton_window`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.kernels.blocks import triton_window as kernels
from lln.kernels.launching.kernel_arguments import mask_bytes
from lln.kernels.launching.recipes import Recipe, Step, launch_heads, over_tiles
from lln.kernels.launching.shapes import layout_of, output_like
from lln.kernels.launching.sizes import SHORT_BLOCK, Sizes
from lln.kernels.launching.stretches import Tile, cdiv

# Narrower windows have too few tiles that are full.
LEAST_SPLIT = 256
# Beyond, the gradients of keys and of values do not fit the registers together.
WIDEST_TOGETHER = 128

# A kernel, the name of its tiles in `Sizes`, the side whose heads it goes over, and what it
# computes, where there is a choice.
_Pass = tuple[Any, str, Tensor, dict[str, bool]]


class WindowCall(NamedTuple):
    """One call.

    Attributes:
        mask: bool ``[B, T]`` or None.
        places: int32 ``[T]``, where the tokens of packed sequences stand
            (`lln.eager.band.places_of`); None = one behind the other.
        window: Tokens on a side, or of a block.
        blocks: Whether a row sees its block; blocks have no mask and no places.
        scale: Factor of the scores.
        causal: Whether a row sees only its own and earlier tokens.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    places: Tensor | None
    window: int
    blocks: bool
    scale: float
    causal: bool


def attend_window(
    call: WindowCall, out: Tensor | None = None, mix: float | None = None
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, T, E]``, and log₂ of every row's normaliser ``[B, H, T]``.

    It is written to ``out``: as mix · out + (1 − mix) · (this), or (None) this alone.
    """
    out = output_like(call.query, call.value.shape[3]) if out is None else out
    norm = torch.empty(call.query.shape[:3], dtype=torch.float32, device=call.query.device)
    if out.numel() > 0:
        steps: list[_Pass] = [(kernels.window_fwd_kernel, "window_read", call.query, {})]
        _launch("window", call, {"p_o": out}, {"p_norm": norm}, mix, steps)
    return out, norm


def window_gradients(
    call: WindowCall,
    out: Tensor,
    norm: Tensor,
    gradient: Tensor,
    made: tuple[Tensor, ...] | None = None,
    mix: float | None = None,
    level: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value, from what `attend_window` found; ``made`` as ``out``.

    With the output and normaliser of more keys than the window's, they are the window's share;
    rowsum(dO ∘ o) goes to ``level``, as ``norm``, for the others.
    """
    if made is None:
        made = tuple([torch.empty_like(side) for side in (call.query, call.key, call.value)])
    if gradient.numel() == 0:
        return tuple([side.zero_() for side in made])
    dq, dk, dv = made
    sides = {"p_o": out, "p_g": gradient, "p_dq": dq, "p_dk": dk, "p_dv": dv}
    wide = max(call.query.shape[3], call.value.shape[3]) > WIDEST_TOGETHER
    own = {"OF_VALUE": not wide, "OF_KEY": True}
    steps: list[_Pass] = [
        (kernels.window_query_kernel, "window_query", call.query, {}),
        (kernels.window_key_kernel, "window_key", call.key, own),
    ]
    if wide:
        own = {"OF_VALUE": True, "OF_KEY": False}
        steps.append((kernels.window_key_kernel, "window_value", call.key, own))
    rows = {"p_norm": norm, "p_level": torch.empty_like(norm) if level is None else level}
    _launch("window backward", call, sides, rows, mix, steps)
    return made


def _launch(
    name: str,
    call: WindowCall,
    sides: dict[str, Tensor],
    rows: dict[str, Tensor],
    mix: float | None,
    steps: list[_Pass],
) -> None:
    """Run the launches of a pass.

    ``sides`` are its tensors ``[B, H, T, channels]`` besides query, key and value, by their names
    in the kernels, and ``rows`` those of one number per row; for mix see `attend_window`.
    """
    query = call.query
    own = {"scale": call.scale, "window": call.window, "CAUSAL": call.causal}
    own |= {"BLOCKS": call.blocks, "ADDS": mix is not None}
    own |= {"HAS_MASK": call.mask is not None, "PACKED": call.places is not None}

    def write(chosen: Sizes, values: dict[str, Any]) -> Recipe:
        made = [
            _step(kernel, call, getattr(chosen, tile), side, values | own | flags)
            for kernel, tile, side, flags in steps
        ]
        return Recipe(made, {})

    # Where there is none, anything that has an address.
    places = query if call.places is None else call.places
    runtime: dict[str, Any] = {**rows, "mix": 0.0 if mix is None else mix}
    runtime |= {"p_mask": mask_bytes(call.mask, query), "p_places": places}
    sides = {"p_q": query, "p_k": call.key, "p_v": call.value, **sides}
    options = (layout_of(call.mask), layout_of(call.places), call[5:], mix is None)
    family = (call.blocks and call.window <= SHORT_BLOCK,)
    block_size = call.window if call.blocks else 0
    launch_heads(name, sides, runtime, options, family, write, block_size)


def _step(kernel: Any, call: WindowCall, tile: Tile, side: Tensor, values: dict[str, Any]) -> Step:
    """A launch over all tiles of a side's heads."""
    tokens = side.shape[2]
    tiles = cdiv(tokens, tile.tokens)
    own = {"tiles": tiles, "BS": tile.across, "EDGES": True}
    if call.blocks:
        # Sizes are powers of two: what fits the longer one fits both.
        longer = max(tile.tokens, tile.across)
        even = call.window % longer == 0 and tokens % call.window == 0
        own["FULL"], own["EDGES"] = even, call.causal or not even
    else:
        unmasked = call.mask is None and call.places is None
        own["FULL"] = unmasked and call.window >= LEAST_SPLIT
    return over_tiles(kernel, (tiles * side.shape[0] * side.shape[1],), values, tile, **own)
