"""Decoding: add one token to the summary, then read it, at a constant cost per token.

A summary is all keys and values so far in a state of fixed size (`lln.eager.summary`).

Dimension legend: B batch, H query heads, Hk key heads, D head width, E value width, SH summary
heads.
"""

from __future__ import annotations

from torch import Tensor

from lln import checks
from lln.checks.call import Call
from lln.eager.summary import KeySummary
from lln.errors import InvalidInputError
from lln.functional import ways
from lln.precision import cast_for_autocast


def decode_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    summary: KeySummary,
    *,
    alpha: float | Tensor,
    impl: str = "auto",
) -> Tensor:
    """One step of causal LLN attention: O(D·E) in time and memory, whatever came before.

    The same as ``summary.append(key, value)`` and then ``summary.read(query, alpha)``; on a GPU
    without gradients both happen in one kernel.

    Args:
        query: ``[B, H, 1, D]``.
        key: ``[B, Hk, 1, D]``.
        value: ``[B, Hk, 1, E]``.
        summary: The keys and values so far; this token is appended to it.
        alpha: A positive number, or a tensor that broadcasts to ``[B, H, 1, 1]``.
        impl: ``"auto"``, ``"eager"`` or ``"triton"``.

    Returns:
        ``[B, H, 1, E]`` in the dtype of query.

    Example:
        >>> import torch
        >>> summary = KeySummary.empty(1, 2, 4, 4, beta=2.0)
        >>> for _ in range(3):
        ...     query, key, value = torch.randn(3, 1, 2, 1, 4)
        ...     out = decode_step(query, key, value, summary, alpha=2.0)
        >>> out.shape
        torch.Size([1, 2, 1, 4])
    """
    query, key, value = cast_for_autocast(query, key, value)
    checks.check_qkv(query, key, value, layout="dense", enable_gqa=True)
    if query.shape[2] != 1 or key.shape[2] != 1:
        raise InvalidInputError(
            f"decode_step takes one token, got T = {query.shape[2]} and S = {key.shape[2]}; give "
            "a whole prompt to lln_attention(is_causal=True) and KeySummary.of."
        )
    if not isinstance(summary, KeySummary):
        raise InvalidInputError(f"summary must be a KeySummary, got {type(summary).__name__}.")
    checks.check_temperature("alpha", alpha, query.shape[0], (query.shape[1],), query.device)
    checks.check_impl(impl)
    if impl in ("reference", "cpu"):
        raise InvalidInputError(f"decode_step has no impl={impl!r}; use 'eager' or 'triton'.")
    call = Call("decode", query, key, value, alpha, summary=summary)
    return ways.prepare(call, impl).run(call)
