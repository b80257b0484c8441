"""Arguments of a call in the form that kernels take: strides, scales, masks, precision."""

from __future__ import annotations

import torch
from torch import Tensor

from lln.kernels.launching.sizes import overrides


def strides_of(packed: bool, **tensors: Tensor) -> dict[str, int]:
    """Strides by their names in the kernels: ``stride_qb`` … of ``p_q``.

    A packed sequence begins where its bound says, so its sample stride is 0.
    """
    return {
        f"stride_{name[2:]}{axis}": 0 if packed and axis == "b" else stride
        for name, tensor in tensors.items()
        for axis, stride in zip("bhtd", tensor.stride(), strict=True)
    }


def flat_scale(scale: Tensor | None, samples: int, stand_in: Tensor) -> Tensor:
    """α or β as float32 ``[B · heads]``; ``stand_in`` where there is none."""
    if scale is None:
        return stand_in
    if scale.dtype == torch.float32 and scale.shape[0] == samples and scale.is_contiguous():
        return scale
    return scale.expand(samples, -1, 1, 1).flatten().float().contiguous()


def flat_beta(beta: Tensor | None, summaries: int, samples: int, stand_in: Tensor) -> Tensor:
    """The same for the β of every summary: ``[B · summaries]``."""
    if beta is not None and beta.shape[1] != summaries:
        beta = beta.repeat_interleave(summaries // beta.shape[1], 1)
    return flat_scale(beta, samples, stand_in)


def mask_bytes(mask: Tensor | None, stand_in: Tensor) -> Tensor:
    """The mask as bytes; ``stand_in`` where there is none."""
    return stand_in if mask is None else mask.contiguous().view(torch.uint8)


def precision_of(query: Tensor, widest: int = 0) -> str:
    """How products of float32 tiles are computed.

    Three TF32 products of high and low parts are as good as float32 within our error budget; plain
    float32 products are unrolled into kernels that take long to compile. But tensor cores truncate
    when they add, so sums over more than 64 slots use plain products.

    Args:
        query: Its type decides.
        widest: The longest sum of an output; 0 = gradients, which have a larger error budget.
    """
    if query.dtype != torch.float32:
        return "tf32"
    return overrides.get("precision", "ieee" if widest > 64 else "tf32x3")


def tensor_or_number(side: float | Tensor, heads: int | None) -> tuple[Tensor | None, float]:
    """A 4-D tensor or None, and a number; the kernels use the number if the tensor is None.

    A tensor with one value is repeated for so many heads; None = it is not.
    """
    if not isinstance(side, Tensor):
        return None, float(side)
    side = side if side.dim() == 4 else side.reshape((1,) * (4 - side.dim()) + side.shape)
    return side.expand(-1, heads, 1, 1) if heads is not None and side.shape[1] == 1 else side, 1.0
