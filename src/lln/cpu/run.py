"""Attention by the compiled passes: call for call what `lln.eager.run` computes with PyTorch.

Inputs are checked, and whoever calls knows that the passes compute the call
(`lln.functional.compiled_calls`). Arithmetic runs in float32; PyTorch computes second derivatives,
and heads of causal calls whose rows lose their digits.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width,
E value width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lln.cpu.compiled_attention import attend_compiled, attend_matched
from lln.cpu.compiled_passes import GROUP, Blocks
from lln.cpu.compiled_walk import walk_compiled
from lln.eager import run as eager
from lln.eager.causal import GUARD, causal_attention
from lln.eager.causal_walk import Inputs
from lln.matching.compiled_matching import compiled_curves, compiled_temperatures


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
        alpha: A number, or broadcasts to ``[B, H, 1, 1]``; None = matched on the way.
        beta: Likewise, or to ``[B, Hk, 1, 1]``; None if ``alpha`` is.
        key_mask: bool ``[B, S]``, True = attend; None = all.
        matching: Where α and β come from if they are not given: ``"variance"`` or ``"entropy"``.
        is_causal: Whether row i sees keys 0 … i only.
        dropout_p: Probability to drop a key.
    """
    sides = eager.widen_inputs(query, key, value, key_mask, dropout_p)
    if is_causal:
        out = _walk(*sides, alpha, beta, matching)
    else:
        out = _attend(*sides, alpha, beta, key_mask, None, matching)
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
    options: dict[str, Any] = {"block_size": block_size, "scale": scale, "is_causal": is_causal}
    options |= {"dropout_p": dropout_p, "impl": "eager"}
    return eager.short_range(query, key, value, key_mask, **options)


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
    if is_causal or isinstance(mix, Tensor) or block_size % GROUP:
        far: dict[str, Any] = {"matching": matching, "is_causal": is_causal}
        near: dict[str, Any] = {"block_size": block_size, "scale": scale, "is_causal": is_causal}
        out = long_range(*sides, alpha, beta, key_mask, **far)
        out = eager.join(out, short_range(*sides, key_mask, **near), mix)
    else:
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        blocks = Blocks(block_size, float(factor), float(mix))
        out = _attend(*sides, alpha, beta, key_mask, blocks, matching)
    return out if out.dtype == query.dtype else out.to(query.dtype)


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
        return eager.both_ranges(*sides, blocks.mix, **how, is_causal=False, impl="eager")

    if alpha is not None and beta is not None:
        return attend_compiled(query, key, value, alpha, beta, key_mask, blocks, by_torch)
    curves = compiled_curves(key, key_mask, matching)
    return attend_matched(query, key, value, curves, key_mask, blocks, by_torch)


def _walk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor | None,
    beta: float | Tensor | None,
    matching: str,
) -> Tensor:
    """A causal call, in float32."""
    if alpha is None or beta is None:
        alpha, beta = compiled_temperatures(query, key, None, matching)
    heads = query.shape[1]
    alpha, beta = (eager.repeat_temperature(one, heads, query.dtype) for one in (alpha, beta))
    inputs = Inputs(query, key, value, alpha, beta, None)
    return walk_compiled(inputs, GUARD[query.dtype], lambda own: causal_attention(*own))
