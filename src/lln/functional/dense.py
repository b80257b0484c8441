"""The entry points for dense tensors: each checks its arguments and calls `lln.functional.run`.

Layout, argument names and order follow ``torch.nn.functional.scaled_dot_product_attention``.

Dimension legend: as in `lln.checks.call`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lln.checks.call import Call
from lln.checks.signatures import explain_misfits
from lln.functional.checked_call import checked_call
from lln.functional.run import attend
from lln.kernels.lln import repeats
from lln.tracing import is_compiling


@explain_misfits
def lln_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    matching: str = "variance",
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    impl: str = "auto",
) -> Tensor:
    """LLN attention in linear time and memory, Eq. (8).

        out_i = Σ_j ⟨e^{αq_i}, e^{βk_j}⟩ v_j / Σ_l ⟨e^{αq_i}, e^{βk_l}⟩

    Args:
        query: ``[B, H, T, D]``, any strides.
        key: ``[B, Hk, S, D]``.
        value: ``[B, Hk, S, E]``.
        alpha: A positive number, or a tensor that broadcasts to ``[B, H, 1, 1]``; may carry
            gradients. None = from ``matching``.
        beta: Likewise; with ``[B, Hk, 1, 1]`` the query heads of a group share one summary of the
            keys and values.
        matching: How α and β follow from the inputs when they are not given: ``"variance"`` or
            ``"entropy"``, per sample and head (see `match_moments`), or ``"paper"``, the authors'
            constants over the whole tensor (samples then depend on their batch-mates).
        key_mask: bool ``[B, S]``, True = attend. A masked key has no effect, whatever it holds. If
            T = S the mask also says which queries count in the statistics.
        dropout_p: Probability to drop a whole key, a column of P (see `lln.eager.dropout`); applied
            whenever it is positive, as in ``scaled_dot_product_attention``.
        is_causal: Whether row i sees keys 0 … i only. Needs T = S and α, β given.
        enable_gqa: Whether H may be a multiple of Hk; the result is that of repeating every key
            head H/Hk times.
        impl: ``"eager"`` (plain PyTorch), ``"cpu"`` (compiled passes), ``"triton"`` or
            ``"reference"`` (N×N in float64): every part of the call runs that way, or it is
            refused. ``"auto"`` uses kernels or compiled passes where they can run and plain PyTorch
            for the rest (`lln.functional.ways`).

    Returns:
        ``[B, H, T, E]`` in the dtype of query (the autocast dtype under autocast). A sequence
        without any valid key gives zeros. NaN or infinity in a query shows in its row (in its whole
        head if α and β are matched), in a key or value in its whole head.

    Raises:
        InvalidInputError: One sentence on what does not fit.
        BackendUnavailableError: If the implementation asked for cannot run.

    Example:
        >>> import torch
        >>> query, key, value = torch.randn(3, 2, 4, 10, 8)
        >>> lln_attention(query, key, value).shape
        torch.Size([2, 4, 10, 8])
    """
    call = Call(
        "lln",
        query,
        key,
        value,
        alpha,
        beta,
        matching,
        key_mask=key_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
    )
    if not is_compiling() and repeats.try_fast_path is not None:
        out = repeats.try_fast_path(call, enable_gqa, impl)
        if out is not None:
            return out
    return attend(checked_call(call, "lln_attention", enable_gqa), impl)


@explain_misfits
def block_diagonal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int,
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Softmax attention inside consecutive blocks of the sequence (section 4.2).

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, T, D]``.
        value: ``[B, Hk, T, E]``.
        block_size: Tokens in a block; the last block may be short, and a block of at least T
            tokens is softmax attention, Eq. (1).
        key_mask: bool ``[B, T]``, True = attend.
        dropout_p: Probability to drop a whole key (see `lln.eager.dropout`).
        is_causal: Whether a token sees only itself and earlier tokens of its block.
        scale: Factor of the scores; None = 1/√D.
        enable_gqa: Whether H may be a multiple of Hk.
        impl: As in `lln_attention`.

    Returns:
        ``[B, H, T, E]`` in the dtype of query. A block without any valid key gives zeros.
    """
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    call = Call("diag", query, key, value, block_size=block_size, key_mask=key_mask, **options)
    return attend(checked_call(call, "block_diagonal_attention", enable_gqa), impl)


@explain_misfits
def lln_diag_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    matching: str = "variance",
    block_size: int | None = None,
    mix: float | Tensor = 0.5,
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    impl: str = "auto",
) -> Tensor:
    """LLN attention combined with block-diagonal softmax attention, the layer of Figure 3.

        out = mix · LLN + (1 − mix) · Diag

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, T, D]``.
        value: ``[B, Hk, T, E]``.
        alpha: As in `lln_attention`.
        beta: As in `lln_attention`.
        matching: As in `lln_attention`.
        block_size: Tokens in a diagonal block; None = D, as in the paper.
        mix: Weight of the LLN part: a number in [0, 1], or a tensor with gradients that broadcasts
            to ``[B, H, T, E]`` (a value per head and channel, or a gate per token
            ``[B, H, T, 1]``).
        key_mask: As in `lln_attention`.
        dropout_p: As in `lln_attention`; a dropped key is dropped from both parts.
        is_causal: As in `lln_attention`, for both parts.
        scale: Factor of the diagonal part's scores; None = 1/√D.
        enable_gqa: As in `lln_attention`.
        impl: As in `lln_attention`.

    Returns:
        ``[B, H, T, E]`` in the dtype of query.

    Example:
        >>> import torch
        >>> query, key, value = torch.randn(3, 2, 4, 10, 8)
        >>> gate = torch.sigmoid(torch.randn(2, 4, 10, 1))
        >>> lln_diag_attention(query, key, value, mix=gate).shape
        torch.Size([2, 4, 10, 8])
    """
    call = Call(
        "lln_diag",
        query,
        key,
        value,
        alpha,
        beta,
        matching,
        mix,
        block_size,  # pyright: ignore[reportArgumentType] None = D, once query is checked
        scale,
        key_mask,
        dropout_p,
        is_causal,
    )
    if not is_compiling() and repeats.try_fast_path is not None:
        out = repeats.try_fast_path(call, enable_gqa, impl)
        if out is not None:
            return out
    return attend(checked_call(call, "lln_diag_attention", enable_gqa), impl)
