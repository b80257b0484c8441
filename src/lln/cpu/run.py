"""Attention by the compiled passes: call for call what `lln.eager.run` computes with PyTorch.

Inputs are checked, and whoever calls knows that the passes compute the call
(`lln.functional.cpu_ways`). Arithmetic runs in float32; PyTorch computes second derivatives,
and heads of causal calls whose rows lose their digits.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width,
E value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.cpu.compiled_attention import attend_blocks_compiled, attend_compiled, attend_matched
from lln.cpu.compiled_matching import compiled_curves
from lln.cpu.compiled_passes import Blocks
from lln.cpu.compiled_walk import walk_compiled
from lln.eager import run as eager
from lln.eager.causal import GUARD
from lln.eager.causal_walk import Inputs
from lln.eager.infinity import as_nan


def long_range(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor | None,
    beta: float | Tensor | None,
    key_mask: Tensor | None,
    *,
    matching: str = "variance",
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """LLN attention: ``[B, H, T, E]`` in the dtype of query.

    Args:
        query: ``[B, H, T, D]`` in float32, bfloat16 or float16, with at least one number.
        key: ``[B, Hk, S, D]``, likewise.
        value: ``[B, Hk, S, E]``, likewise.
        alpha: A number, or broadcasts to ``[B, H, 1, 1]``; None = matched on the way, in calls that
            are not causal.
        beta: Likewise, or to ``[B, Hk, 1, 1]``; None if ``alpha`` is.
        key_mask: bool ``[B, S]``, True = attend; None = all.
        matching: Where α and β come from if they are not given: ``"variance"`` or ``"entropy"``.
        is_causal: Whether row i sees keys 0 … i only.
        dropout_p: Probability to drop a key.
    """
    sides = eager.widen_inputs(query, key, value, key_mask, dropout_p)
    out = _far(*sides, alpha, beta, key_mask, matching, is_causal)
    return out if out.dtype == query.dtype else out.to(query.dtype)


def short_range(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    *,
    block_size: int,
    scale: float | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """Block-diagonal attention: ``[B, H, T, E]`` in the dtype of query.

    Args:
        query: ``[B, H, T, D]`` in float32, bfloat16 or float16, with at least one number.
        key: ``[B, Hk, T, D]``, likewise.
        value: ``[B, Hk, T, E]``, likewise.
        key_mask: bool ``[B, T]``, True = attend; None = all.
        block_size: Tokens in a block; they are counted from the first token that is not masked.
        scale: Factor of the scores; None = 1/√D.
        is_causal: Whether a token sees only itself and earlier tokens of its block.
        dropout_p: Probability to drop a key.
    """
    sides = eager.widen_inputs(query, key, value, key_mask, dropout_p)
    out = _near(*sides, key_mask, block_size, scale, is_causal)
    return out if out.dtype == query.dtype else out.to(query.dtype)


def both_ranges(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor | None,
    beta: float | Tensor | None,
    key_mask: Tensor | None,
    mix: float | Tensor,
    *,
    block_size: int,
    scale: float | None = None,
    matching: str = "variance",
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """LLN and block-diagonal attention combined: ``[B, H, T, E]`` in the dtype of query.

    Args:
        query: As in `long_range`; the same keys are dropped from both parts.
        key: See there; T = S.
        value: See there.
        alpha: See there.
        beta: See there.
        key_mask: See there.
        mix: Weight of LLN, a number or a tensor that broadcasts to the output.
        block_size: As in `short_range`.
        scale: See there.
        matching: As in `long_range`.
        is_causal: See there.
        dropout_p: See there.
    """
    sides = eager.widen_inputs(query, key, value, key_mask, dropout_p)
    if is_causal or isinstance(mix, Tensor) or _learn(alpha, beta):
        out = _far(*sides, alpha, beta, key_mask, matching, is_causal)
        out = eager.join(out, _near(*sides, key_mask, block_size, scale, is_causal), mix)
    else:
        blocks = Blocks(block_size, _factor(query, scale), float(mix))
        out = _attend(*sides, alpha, beta, key_mask, blocks, matching)
    return out if out.dtype == query.dtype else out.to(query.dtype)


def _factor(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else float(scale)


def _learn(*numbers: object) -> bool:
    """Whether one of the temperatures needs a gradient."""
    return torch.is_grad_enabled() and any(
        isinstance(number, Tensor) and number.requires_grad for number in numbers
    )


def _of_heads(query: Tensor, number: Any) -> Any:
    """A temperature per key head as one per query head."""
    return eager.repeat_temperature(number, query.shape[1], query.dtype)


def _far(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor | None,
    beta: float | Tensor | None,
    key_mask: Tensor | None,
    matching: str,
    is_causal: bool,
) -> Tensor:
    """LLN attention in float32."""
    heads = query.shape[1]
    if _learn(alpha, beta):
        alpha, beta = _of_heads(query, alpha), _of_heads(query, beta)
        # Temperatures are multiplied in by autograd, which then knows their gradients.
        if key_mask is not None:
            key = torch.where(key_mask[:, None, :, None], key, 0.0)
        if isinstance(beta, Tensor) and beta.shape[1] > 1:
            key, value = eager.repeat_heads(key, heads), eager.repeat_heads(value, heads)
        query, key, alpha, beta = query * alpha, key * beta, 1.0, 1.0
    if is_causal:
        return _walk(query, key, value, alpha, beta, key_mask)
    return _attend(query, key, value, alpha, beta, key_mask, None, matching)


def _near(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    block_size: int,
    scale: float | None,
    is_causal: bool,
) -> Tensor:
    """Block-diagonal attention in float32."""
    how: dict[str, Any] = {"block_size": block_size, "scale": scale, "is_causal": is_causal}

    def by_torch(query: Tensor, key: Tensor, value: Tensor, *_: float) -> Tensor:
        return eager.short_range(query, key, value, key_mask, **how, impl="eager")

    blocks = Blocks(block_size, _factor(query, scale), None, is_causal)
    return attend_blocks_compiled(as_nan(query), as_nan(key), value, key_mask, blocks, by_torch)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor | None,
    beta: float | Tensor | None,
    key_mask: Tensor | None,
    blocks: Blocks | None,
    matching: str,
) -> Tensor:
    """A call that is not causal, in float32."""

    def by_torch(query: Tensor, key: Tensor, value: Tensor, alpha: Any, beta: Any) -> Tensor:
        sides = (query, key, value, alpha, beta, key_mask)
        if blocks is None:
            return eager.long_range(*sides, is_causal=False, impl="eager")
        how: dict[str, Any] = {"block_size": blocks.size, "scale": blocks.scale}
        mix = 1.0 if blocks.mix is None else blocks.mix
        return eager.both_ranges(*sides, mix, **how, is_causal=False, impl="eager")

    if alpha is None or beta is None:
        curves = compiled_curves(key, key_mask, matching)
        return attend_matched(query, key, value, curves, key_mask, blocks, by_torch)
    if key.shape[1] != query.shape[1]:
        alpha, beta = _of_heads(query, alpha), _of_heads(query, beta)
    return attend_compiled(query, key, value, alpha, beta, key_mask, blocks, by_torch)


def _walk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor | None,
    beta: float | Tensor | None,
    key_mask: Tensor | None,
) -> Tensor:
    """A causal call, in float32."""
    alpha, beta = _of_heads(query, alpha), _of_heads(query, beta)

    def by_torch(inputs: Inputs) -> Tensor:
        return eager.long_range(*inputs, is_causal=True, impl="eager", walks=True)

    inputs = Inputs(query, key, value, alpha, beta, key_mask)
    return walk_compiled(inputs, GUARD[query.dtype], by_torch)
