"""Softmax attention of many small blocks by PyTorch's fused attention, for CPUs without MKL.

There a batch of small products runs on one thread, one after the other; fused attention takes the
blocks as samples and shares them between threads. On two ARM cores it takes half the time, on one a
fifth less forward. With MKL the products of `lln.eager.block_softmax` use all threads.

Dimension legend: n blocks of all heads and samples, b tokens in a block, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.eager.block_softmax import by_autograd
from lln.tracing import is_batched

_NAME = "_scaled_dot_product_flash_attention_for_cpu"
_attend: Any = getattr(torch.ops.aten, _NAME, None)
_differentiate: Any = getattr(torch.ops.aten, f"{_NAME}_backward", None)
_IS_FASTER = not torch.backends.mkl.is_available() and None not in (_attend, _differentiate)


def suits(query: Tensor, value: Tensor) -> bool:
    """Whether blocks without a mask are to be attended to this way."""
    return _IS_FASTER and query.dtype == torch.float32 and query.shape[-1] == value.shape[-1]


class BlockFlash(torch.autograd.Function):
    """Output of the blocks, and gradients of query, key and value.

    Takes query, key, value ``[..., b, D]``, the scale, whether a token sees only itself and earlier
    ones, and a function of query, key and value that computes the same with PyTorch's own
    gradients: second derivatives and batches of gradients go through it.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """``[..., b, D]``."""
        query, key, value, scale, is_causal, again = given
        sides = [_as_samples(side) for side in (query, key, value)]
        out, log_mass = _attend(*sides, 0.0, is_causal, scale=scale)
        ctx.save_for_backward(query, key, value, out, log_mass)
        ctx.scale, ctx.is_causal, ctx.again = scale, is_causal, again
        return out.reshape(query.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """All three at once, or the long way."""
        query, key, value, out, log_mass = ctx.saved_tensors
        (gradient,) = gradients
        needs = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or is_batched(gradient):
            found = by_autograd(ctx.again, (query, key, value), needs, gradient)
            return (*found, None, None, None)
        sides = [_as_samples(side) for side in (gradient, query, key, value)]
        made = _differentiate(*sides, out, log_mass, 0.0, ctx.is_causal, scale=ctx.scale)
        found = [
            one.reshape(query.shape) if need else None
            for one, need in zip(made, needs, strict=True)
        ]
        return (*found, None, None, None)


def _as_samples(side: Tensor) -> Tensor:
    """``[..., b, D]`` → ``[n, 1, b, D]``: then the output lies in memory row by row."""
    return side.reshape(-1, 1, *side.shape[-2:])
