"""The entry points for packed sequences: ``[T, H, D]`` with ``cu_seqlens``, no padding anywhere.

Sequence s holds the tokens ``cu_seqlens[s] … cu_seqlens[s + 1] − 1`` and attends to itself only.

Dimension legend: T packed tokens, H query heads, Hk key heads, D head width, E value width,
n sequences.
"""

from __future__ import annotations

from torch import Tensor

from lln import checks
from lln.checks.bounds import check_bounds
from lln.checks.call import Call
from lln.checks.signatures import explain_misfits
from lln.functional.run import attend
from lln.precision import cast_for_autocast


@explain_misfits
def lln_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int | None = None,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    matching: str = "variance",
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    key_mask: None = None,
    impl: str = "auto",
) -> Tensor:
    """LLN attention, Eq. (8), inside each of several packed sequences.

    Args:
        query: ``[T, H, D]``.
        key: ``[T, Hk, D]``.
        value: ``[T, Hk, E]``.
        cu_seqlens: int32 or int64 ``[n + 1]``: 0, then the end of every sequence.
        max_seqlen: Length of the longest sequence, if known; saves work on many short ones.
        alpha: A positive number, or a tensor that broadcasts to ``[n, H, 1, 1]``; None = from
            ``matching``, per sequence and head.
        beta: Likewise.
        matching: As in `lln_attention`; ``"paper"`` takes one statistic over all tokens.
        dropout_p: As in `lln_attention`.
        is_causal: As in `lln_attention`; needs α and β.
        enable_gqa: As in `lln_attention`.
        key_mask: Refused: packed sequences have no padding to mask.
        impl: As in `lln_attention`.

    Returns:
        ``[T, H, E]`` in the dtype of query, equal to one call per sequence.

    Example:
        >>> import torch
        >>> query, key, value = torch.randn(3, 10, 2, 8)
        >>> lln_attention_varlen(query, key, value, torch.tensor([0, 3, 10])).shape
        torch.Size([10, 2, 8])
    """
    query, key, value = cast_for_autocast(query, key, value)
    checks.check_qkv(query, key, value, layout="packed", enable_gqa=enable_gqa)
    longest = check_bounds(cu_seqlens, max_seqlen, key_mask, query)
    samples = cu_seqlens.shape[0] - 1
    checks.check_options(
        query, key, samples, alpha, beta, matching, dropout_p=dropout_p, is_causal=is_causal
    )
    call = Call(
        "lln",
        query,
        key,
        value,
        alpha,
        beta,
        matching,
        dropout_p=dropout_p,
        is_causal=is_causal,
        bounds=cu_seqlens,
        longest=longest,
    )
    return attend(call, impl)


@explain_misfits
def lln_diag_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int | None = None,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    matching: str = "variance",
    block_size: int | None = None,
    mix: float | Tensor = 0.5,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_mask: None = None,
    impl: str = "auto",
) -> Tensor:
    """LLN + block-diagonal attention, Figure 3, inside each of several packed sequences.

    Every sequence starts a new block.

    Args:
        query: ``[T, H, D]``.
        key: ``[T, Hk, D]``.
        value: ``[T, Hk, E]``.
        cu_seqlens: int32 or int64 ``[n + 1]``: 0, then the end of every sequence.
        max_seqlen: Length of the longest sequence, if known; saves work on many short ones.
        alpha: As in `lln_attention_varlen`.
        beta: As in `lln_attention_varlen`.
        matching: As in `lln_attention_varlen`.
        block_size: Tokens in a diagonal block; None = D.
        mix: Weight of the LLN part: a number in [0, 1], or a tensor with gradients that broadcasts
            to ``[T, H, E]``.
        dropout_p: As in `lln_diag_attention`.
        is_causal: As in `lln_diag_attention`.
        scale: As in `lln_diag_attention`.
        enable_gqa: As in `lln_diag_attention`.
        key_mask: Refused: packed sequences have no padding to mask.
        impl: As in `lln_attention`.

    Returns:
        ``[T, H, E]`` in the dtype of query, equal to one call per sequence.
    """
    query, key, value = cast_for_autocast(query, key, value)
    checks.check_qkv(query, key, value, layout="packed", enable_gqa=enable_gqa)
    longest = check_bounds(cu_seqlens, max_seqlen, key_mask, query)
    samples = cu_seqlens.shape[0] - 1
    checks.check_options(
        query, key, samples, alpha, beta, matching, dropout_p=dropout_p, is_causal=is_causal
    )
    block_size = query.shape[-1] if block_size is None else block_size
    checks.check_blocks(block_size, scale)
    checks.check_mix(mix, (*query.shape[:2], value.shape[-1]), query.device)
    call = Call(
        "lln_diag",
        query,
        key,
        value,
        alpha,
        beta,
        matching,
        mix,
        block_size,
        scale,
        None,
        dropout_p,
        is_causal,
        cu_seqlens,
        longest,
    )
    return attend(call, impl)
