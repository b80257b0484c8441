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

from lln.kernels.blocks import window_ops
from lln.kernels.launching.operators import once_differentiable
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
        return _AttendSlices.apply(*tensors, numbers, width, blocks)
    return _forward(tensors, numbers, width, blocks, save=False)[0]


def is_tracked(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a backward pass may follow."""
    return torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )


def _has_channels(mix: Tensor | None) -> bool:
    return mix is not None and mix.shape[-1] > 1


def _forward(
    tensors: Sequence[Any],
    numbers: tuple[Any, ...],
    width: int,
    blocks: AddedBlocks | None,
    save: bool,
) -> tuple[Tensor, list[Tensor | None]]:
    """Output, and the summaries of all slices one after another."""
    out = output_like(tensors[0], tensors[VALUE].shape[-1])
    summaries: list[Tensor | None] = []
    for part, own in cut(tensors, width):
        summaries += lln_ops.forward((*own, *numbers), save, out[..., part])[1:]
    if blocks is not None:
        window_ops.add_blocks(tensors[:3], blocks.numbers, out, blocks.mix)
    return out, summaries


class _AttendSlices(torch.autograd.Function):
    """All slices with one node of autograd, so that no slice is copied or padded with zeros."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, numbers, width, blocks = inputs
        out, summaries = _forward(tensors, numbers, width, blocks, save=True)
        ctx.save_for_backward(*tensors, *summaries)
        ctx.numbers, ctx.width, ctx.blocks = numbers, width, blocks
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
        (gradient,) = grad_outputs
        if gradient is None:
            return (None,) * (lln_ops.TENSORS + 3)
        tensors, summaries = (
            ctx.saved_tensors[: lln_ops.TENSORS],
            ctx.saved_tensors[lln_ops.TENSORS :],
        )
        dv = torch.empty_like(tensors[VALUE])
        asked, total, of_mix = lln_ops.asked_gradients(ctx), None, []
        for index, (part, own) in enumerate(cut(tensors, ctx.width)):
            log_mass, centroid = summaries[2 * index : 2 * index + 2]
            dq, dk, made, dalpha, dbeta, dmix = lln_ops.gradients(
                gradient[..., part],
                (*own, *ctx.numbers),
                log_mass,
                centroid,
                asked,
                dv[..., part],
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
        if ctx.blocks is not None:
            mix, own = ctx.blocks
            window_ops.add_block_gradients(gradient, tensors[:3], own, (dq, dk, dv), mix)
            # The others are of the LLN part alone.
            dalpha, dbeta = (None if side is None else side * mix for side in (dalpha, dbeta))
        dmix = torch.cat(of_mix, -1) if asked[2] and of_mix else dmix[0] if dmix else None
        return dq, dk, dv, dalpha, dbeta, None, dmix, None, None, None, None


def _add(total: list[Tensor | None], more: list[Tensor | None]) -> list[Tensor | None]:
    """Sums in place; None stays None."""
    return [
        None if side is None or other is None else side.add_(other)
        for side, other in zip(total, more, strict=True)
    ]
