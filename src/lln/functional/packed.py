"""The entry points for packed sequences: ``[T, H, D]`` with ``cu_seqlens``, no padding anywhere.

Sequence s holds the tokens ``cu_seqlens[s] … cu_seqlens[s + 1] − 1`` and attends to itself only.

Dimension legend: as in `lln.checks.call`, with T packed tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lln.checks.call import Call
from lln.checks.signatures import explain_misfits
from lln.functional.checked_call import checked_packed_call
from lln.functional.run import attend


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
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal}
    packing = {"key_mask": key_mask, "bounds": cu_seqlens}
    call = Call("lln", query, key, value, alpha, beta, matching, **options, **packing)
    return attend(checked_packed_call(call, max_seqlen, enable_gqa), impl)


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
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    packing = {"key_mask": key_mask, "bounds": cu_seqlens}
    # Without a block size it is D, once query is checked.
    blocks = {"mix": mix, "block_size": block_size}
    call = Call(
        "lln_diag", query, key, value, alpha, beta, matching, **blocks, **options, **packing
    )
    return attend(checked_packed_call(call, max_seqlen, enable_gqa), impl)
