"""PyTorch's fused softmax attention with a mask, forward and backward, below its autograd.

The masks of `lln.eager.masked_keys` are made again for the backward pass, so both passes are called
by themselves. A CPU has one fused attention; of those of a GPU only the memory-efficient one takes
a mask. It multiplies float32 numbers as sums of three products of shorter ones, so that next to
nothing of their precision is lost.

Dimension legend: B batch, H heads, R queries, S keys, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Numbers in the rows of every operand, and in those of a mask's memory, are multiples of this.
ALIGNMENT = {"cpu": 1, "cuda": 8}

_forward_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_forward_on_gpu = torch.ops.aten._efficient_attention_forward
_backward_on_gpu = torch.ops.aten._efficient_attention_backward


def aligned(width: int, device: torch.device) -> int:
    """The least width from this one on that a device's kernels take."""
    step = ALIGNMENT[device.type]
    return -(-width // step) * step


def softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention ``[B, H, R, D]``, and logarithms of its normalisers in the kernel's layout.

    Args:
        query: ``[B, H, R, D]``, D a multiple of the device's `ALIGNMENT`.
        key: ``[B, H, S, D]``.
        value: ``[B, H, S, D]``.
        mask: ``[B, H, R, S]``, added to the scores, in the dtype of query; in memory
            its rows begin a multiple of `ALIGNMENT` numbers apart.
        scale: Factor of the scores.
    """
    if query.is_cpu:
        sides = (query, key, value, 0.0, False)
        out, norm = _forward_on_cpu(*sides, attn_mask=mask, scale=scale)
        return out, norm
    turned = [side.transpose(1, 2) for side in (query, key, value)]
    plain = (None, None, None, None, 0.0, 0, True)
    out, norm, *_ = _forward_on_gpu(*turned, mask, *plain, scale=scale)
    return out.transpose(1, 2), norm


def softmax_attention_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    out: Tensor,
    norm: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value from that of the output, ``[B, H, R, D]``.

    The other arguments are those of `softmax_attention` and, as ``out`` and ``norm``, its results.
    """
    if query.is_cpu:
        sides = (gradient, query, key, value, out, norm, 0.0, False)
        dq, dk, dv = _backward_on_cpu(*sides, attn_mask=mask, scale=scale)
        return dq, dk, dv
    upstream, *turned = (
        side.transpose(1, 2) for side in (gradient.contiguous(), query, key, value)
    )
    # Of bfloat16 numbers the kernel adds up gradient · output by itself, and takes it for granted
    # that the output lies in memory as the forward pass wrote it.
    made = out.transpose(1, 2).contiguous()
    # Nothing is dropped, so the state of the random numbers has no meaning.
    state = torch.zeros((), dtype=torch.int64)
    found = _backward_on_gpu(
        upstream, *turned, mask, made, None, None, query.shape[2], key.shape[2], norm, 0.0, state,
        state, 0, False, scale=scale, num_splits_key=1,
    )  # fmt: skip
    dq, dk, dv = (side.transpose(1, 2) for side in found[:3])
    return dq, dk, dv
