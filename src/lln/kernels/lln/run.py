"""Calls of the kernels: seeds, slices of wide values, and autograd.

Through the operators of `lln.kernels.lln.lln_ops` or without (`lln.kernels.launching.operators`).

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width,
E value width, n packed sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.eager.dropout import drop_keys
from lln.kernels.launching.kernel_arguments import tensor_or_number
from lln.kernels.launching.operators import launched
from lln.kernels.launching.shapes import within_reach
from lln.kernels.lln import lln_ops, slices
from lln.tracing import is_capturing, is_watched


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: float | Tensor,
    beta: float | Tensor,
    value_width: int,
    key_mask: Tensor | None = None,
    mix: float | Tensor = 1.0,
    block_size: int = 0,
    scale: float = 1.0,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    bounds: Tensor | None = None,
    longest: int = 0,
    added: slices.AddedBlocks | None = None,
) -> Tensor:
    """LLN attention by the kernels: ``[B, H, T, E]`` in the dtype of query.

    The arguments are those of a `lln.kernels.summaries.lln_call.LLNCall`, where α, β and mix are
    numbers or tensors that broadcast to ``[B, H, 1, 1]`` (packed: ``[n, H, 1, 1]``), β also to
    ``[B, Hk, 1, 1]``, and mix to ``[B, H, T, E]``. Values of more than ``value_width`` channels are
    read in slices; ``added`` is a diagonal part to add in place, in ordinary calls.
    """
    query, key, value = within_reach(query), within_reach(key), within_reach(value)
    if dropout_p > 0 and is_capturing():
        # The seed is a constant in a CUDA graph: every replay would drop the same keys.
        value, dropout_p = drop_keys(value, dropout_p), 0.0
    alpha_t, alpha_number = tensor_or_number(alpha, query.shape[1])
    # With one β for all heads, the query heads of a group can share a summary of keys and values.
    beta_t, beta_number = tensor_or_number(beta, key.shape[1])
    mix_t, mix_number = tensor_or_number(mix, None)
    seed = int(torch.randint(0, 2**31 - 1, ()).item()) if dropout_p > 0 else 0
    numbers = (alpha_number, beta_number, mix_number, block_size, scale, dropout_p, seed)
    numbers = (*numbers, is_causal, longest)
    if value.shape[-1] <= value_width and added is None:
        return _attend_lln(query, key, value, alpha_t, beta_t, key_mask, mix_t, bounds, *numbers)
    tensors = (query, key, value, alpha_t, beta_t, key_mask, mix_t, bounds)
    if is_watched(query):
        parts = slices.cut(tensors, value_width)
        return torch.cat([_attend_lln(*part, *numbers) for _, part in parts], -1)
    return slices.attend_in_slices(tensors, numbers, value_width, added)


def _attend_lln(*arguments: Any) -> Tensor:
    """One call with or without gradient, through the operator where the call is traced."""
    tracked = slices.is_tracked(arguments[: lln_ops.TENSORS])
    if is_watched(arguments[0]):
        return lln_ops.attend_saving(*arguments)[0] if tracked else lln_ops.attend_lln(*arguments)
    if not tracked:
        return lln_ops.forward(arguments, save=False)[0]
    return launched(lln_ops.ORDINARY, *arguments)
