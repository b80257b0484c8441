"""Block-diagonal attention alone, from tensors to kernels: one pass forward and one backward.

Dimension legend: see `lln.kernels.blocks.triton_blocks`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.kernels.blocks.triton_blocks import LOOK, blocks_bwd_kernel, blocks_fwd_kernel, gap_kernel
from lln.kernels.launching.kernel_arguments import mask_bytes
from lln.kernels.launching.recipes import Recipe, Step, Workspace, launch_heads, over_tiles
from lln.kernels.launching.shapes import layout_of, output_like
from lln.kernels.launching.sizes import Sizes
from lln.kernels.launching.stretches import Tile, cdiv
from lln.kernels.summaries.lln_call import LLNCall


class BlockCall(NamedTuple):
    """One call.

    Attributes:
        mask: bool ``[B, T]`` or None.
        block_size: Tokens in a block; a block fits a tile.
        scale: Factor of the scores.
        causal: Whether a token sees only itself and earlier tokens of its block.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    block_size: int
    scale: float
    causal: bool


def attend_whole_blocks(call: BlockCall) -> Tensor:
    """Output ``[B, H, T, E]``."""
    out = output_like(call.query, call.value.shape[3])
    if out.numel() > 0:
        _launch(blocks_fwd_kernel, call, call.query.shape[1], "joint_read", p_o=out)
    return out


def whole_blocks_gradients(call: BlockCall, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    dq, dk, dv = (torch.empty_like(side) for side in (call.query, call.key, call.value))
    if gradient.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    made = {"p_g": gradient, "p_dq": dq, "p_dk": dk, "p_dv": dv}
    _launch(blocks_bwd_kernel, call, call.key.shape[1], "joint_grad", **made)
    return dq, dk, dv


def _launch(kernel: Any, call: BlockCall, heads: int, walker: str, **others: Tensor) -> None:
    """One launch over all stretches of all (sample, head) pairs; ``heads`` programs per sample.

    ``walker`` is the field of `Sizes` with its tile; ``others`` are its tensors besides query, key
    and value, by their names in the kernel.
    """
    query, mask = call.query, call.mask
    batch, tokens = query.shape[0], query.shape[2]

    def write(chosen: Sizes, values: dict[str, Any]) -> Recipe:
        tile: Tile = getattr(chosen, walker)
        rows = chosen.block_rows
        # With a mask the first block may begin before the first token.
        reach = tokens if mask is None else tokens + call.block_size - 1
        stretch = tile.stretch(reach, rows, batch * heads, chosen.cores)
        splits = cdiv(reach, stretch)
        values |= {
            "H": heads,
            "HK": heads,
            "scale": call.scale,
            "block_size": call.block_size,
            "tile_tokens": rows,
            "program_tokens": stretch,
            "splits": splits,
            "CAUSAL": call.causal,
            "EVEN": mask is None and tile.tokens == rows and tokens % rows == 0,
            "ONE_BLOCK": tile.tokens == call.block_size,
            "HAS_MASK": mask is not None,
        }
        before, workspace = ([], {}) if mask is None else find_gaps(batch, tokens, call.block_size)
        return Recipe(
            [*before, over_tiles(kernel, (splits * batch * heads,), values, tile)], workspace
        )

    byte_mask = mask_bytes(mask, query)
    sides = {"p_q": query, "p_k": call.key, "p_v": call.value, **others}
    runtime = {"p_mask": byte_mask, "p_starts": byte_mask}
    options = ("blocks", layout_of(mask), *call[4:])
    family = ("blocks", call.block_size)
    launch_heads(walker, sides, runtime, options, family, write, call.block_size)


def find_gaps(samples: int, tokens: int, block_size: int) -> tuple[list[Step], Workspace]:
    """The launch that writes where blocks begin, ``p_starts``, and the memory for it."""
    values = {"tokens": tokens, "block_size": block_size, "LOOK": LOOK}
    workspace: Workspace = {"p_starts": ((samples,), torch.int32)}
    return [Step(gap_kernel, (samples,), values, 4)], workspace


def starts_of(call: LLNCall) -> tuple[list[Step], Workspace]:
    """The same for a call; nothing where blocks begin with the sequences, as ``bounds`` say."""
    if not call.is_shifted:
        return [], {}
    return find_gaps(call.samples, call.key.shape[2], call.block_size)
