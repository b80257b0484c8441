"""The entry points of attention inside a sliding window: dense and packed.

Dimension legend: as in `lln.checks.call`, with T tokens.
"""

from __future__ import annotations

from torch import Tensor

from lln.checks.call import Call
from lln.checks.signatures import explain_misfits
from lln.functional.checked_call import checked_call, checked_packed_call
from lln.functional.run import attend


@explain_misfits
def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int,
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Softmax attention to the tokens nearby, exact, in linear time and memory.

        out_i = Σ_j softmax_j(scale · q_i·k_j) v_j over |i − j| ≤ window

    Args:
        query: ``[B, H, T, D]``, any strides.
        key: ``[B, Hk, T, D]``.
        value: ``[B, Hk, T, E]``.
        window: How many tokens a query sees on either side of its own, or before its own if
            ``is_causal``. 0 = its own alone; from T - 1 on this is softmax attention, Eq. (1).
            FlashAttention's ``window_size=(w, w)`` is ``window=w``; Hugging Face's causal
            ``sliding_window=s`` counts the own token and is ``window=s - 1``.
        key_mask: bool ``[B, T]``, True = attend. A masked key has no effect, whatever it holds.
        dropout_p: Probability to drop a whole key (see `lln.eager.dropout`).
        is_causal: Whether a query sees only its own and earlier tokens.
        scale: Factor of the scores; None = 1/√D.
        enable_gqa: Whether H may be a multiple of Hk.
        impl: As in `lln_attention`.

    Returns:
        ``[B, H, T, E]`` in the dtype of query. A row that sees no valid key gives zeros. NaN in a
        key or value shows in every row that sees it, and may show in rows near those.

    Example:
        >>> import torch
        >>> query, key, value = torch.randn(3, 1, 2, 200, 16)
        >>> window_attention(query, key, value, window=64).shape
        torch.Size([1, 2, 200, 16])
    """
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "window": window}
    call = Call("window", query, key, value, key_mask=key_mask, **options)
    return attend(checked_call(call, "window_attention", enable_gqa), impl)


@explain_misfits
def window_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    window: int,
    max_seqlen: int | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_mask: None = None,
    impl: str = "auto",
) -> Tensor:
    """`window_attention` inside each of several packed sequences.

    Args:
        query: ``[T, H, D]``.
        key: ``[T, Hk, D]``.
        value: ``[T, Hk, E]``.
        cu_seqlens: int32 or int64 ``[n + 1]``: 0, then the end of every sequence.
        window: As in `window_attention`.
        max_seqlen: Length of the longest sequence, if known.
        dropout_p: As in `window_attention`.
        is_causal: Likewise.
        scale: Likewise.
        enable_gqa: Likewise.
        key_mask: Refused: packed sequences have no padding to mask.
        impl: As in `lln_attention`.

    Returns:
        ``[T, H, E]`` in the dtype of query, equal to one call per sequence.

    Example:
        >>> import torch
        >>> query, key, value = torch.randn(3, 10, 2, 8)
        >>> bounds = torch.tensor([0, 3, 10])
        >>> window_attention_varlen(query, key, value, bounds, window=2).shape
        torch.Size([10, 2, 8])
    """
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "window": window}
    call = Call("window", query, key, value, key_mask=key_mask, bounds=cu_seqlens, **options)
    return attend(checked_packed_call(call, max_seqlen, enable_gqa), impl)
