"""Wide values in slices: an output channel depends only on the same channel of the values.

Every slice is a call of its own, which writes its channels of the output, and of the gradient of
the values, where they belong. Gradients of the other inputs are sums over the slices.

*Blocks* are a diagonal part that is added in place, to output and gradients of all slices
(`lln.kernels.blocks.launch_window`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.kernels.blocks import block_ops
from lln.kernels.launching.operators import launched
from lln.kernels.launching.shapes import output_like
from lln.kernels.lln import lln_ops

VALUE, MIX = 2, 6


class AddedBlocks(NamedTuple):
    """A diagonal part to add.

    Attributes:
        mix: The weight of the LLN part.
        numbers: Block size, scale, and whether it is causal.
    """

    mix: float
    numbers: tuple[int, float, bool]


def cut(tensors: Sequence[Any], width: int) -> Iterator[tuple[slice, tuple[Any, ...]]]:
    """The channels of every slice, and its tensors; ``width`` channels of the values per slice."""
    mix = tensors[MIX]
    for start in range(0, tensors[VALUE].shape[-1], width):
        part = slice(start, start + width)
        own = list(tensors)
        own[VALUE] = tensors[VALUE][..., part]
        if _has_channels(mix):
            own[MIX] = mix[..., part]
        yield part, tuple(own)


def attend_in_slices(
    tensors: Sequence[Any], numbers: tuple[Any, ...], width: int, blocks: AddedBlocks | None = None
) -> Tensor:
    """A call in slices, with or without gradient."""
    if is_tracked(tensors):
        return launched(_OPERATION, *tensors, *numbers, width, blocks)
    return _forward(*tensors, *numbers, width, blocks, save=False)[0]


def is_tracked(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a backward pass may follow."""
    return torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )


def _has_channels(mix: Tensor | None) -> bool:
    return mix is not None and mix.shape[-1] > 1


def _forward(*inputs: Any, save: bool = True) -> tuple[Any, ...]:
    """Output, and the summaries of all slices one after another."""
    tensors, (*numbers, width, blocks) = inputs[: lln_ops.TENSORS], inputs[lln_ops.TENSORS :]
    out = output_like(tensors[0], tensors[VALUE].shape[-1])
    summaries: list[Tensor | None] = []
    for part, own in cut(tensors, width):
        summaries += lln_ops.forward((*own, *numbers), save, out[..., part])[1:]
    if blocks is not None:
        block_ops.add_blocks(tensors[:3], blocks.numbers, out, blocks.mix)
    return out, *summaries


def _gradients(
    found: Sequence[Tensor], inputs: Sequence[Any], summaries: Sequence[Any], asked: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of all slices at once, so that no slice is copied or padded with zeros."""
    gradient, tensors = found[0], inputs[: lln_ops.TENSORS]
    *numbers, width, blocks = inputs[lln_ops.TENSORS :]
    dv = torch.empty_like(tensors[VALUE])
    total, of_mix = None, []
    for index, (part, own) in enumerate(cut(tensors, width)):
        log_mass, centroid = summaries[2 * index : 2 * index + 2]
        given, wanted = (*own, *numbers), (asked[0], asked[1], asked[2])
        dq, dk, made, dalpha, dbeta, dmix = lln_ops.gradients(
            gradient[..., part], given, log_mass, centroid, wanted, dv[..., part]
        )
        if made.data_ptr() != dv[..., part].data_ptr():
            dv[..., part] = made
        sums = [dq, dk, dalpha, dbeta]
        if _has_channels(tensors[MIX]):
            of_mix.append(dmix)
        else:
            sums.append(dmix)
        total = sums if total is None else _add(total, sums)
    assert total is not None
    dq, dk, dalpha, dbeta, *dmix = total
    assert dq is not None
    assert dk is not None
    if blocks is not None:
        mix, own = blocks
        block_ops.add_block_gradients(gradient, tensors[:3], own, (dq, dk, dv), mix)
        # The others are of the LLN part alone.
        dalpha, dbeta = (None if side is None else side * mix for side in (dalpha, dbeta))
    dmix = torch.cat(of_mix, -1) if asked[2] and of_mix else dmix[0] if dmix else None
    return dq, dk, dv, dalpha, dbeta, dmix


def _add(total: list[Tensor | None], more: list[Tensor | None]) -> list[Tensor | None]:
    """Sums in place; None stays None."""
    return [
        None if side is None or other is None else side.add_(other)
        for side, other in zip(total, more, strict=True)
    ]


_OPERATION = lln_ops.ORDINARY._replace(
    launch=_forward, differentiate=_gradients, kept=slice(1, None)
)
