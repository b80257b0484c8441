"""The entry points for dense tensors: check → match → summarise → read.

Layout, argument names and order follow ``torch.nn.functional.scaled_dot_product_attention``.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width,
E value width.
"""

from __future__ import annotations

from torch import Tensor

from lln import checks
from lln.checks.signatures import explain_misfits
from lln.eager import run
from lln.eager.diagonal import asks_gradient, has_channels
from lln.eager.dropout import drop_keys
from lln.errors import BackendUnavailableError
from lln.functional.match import match_inputs
from lln.functional.plan import choose_implementation
from lln.kernels.block_ops import fused_blocks
from lln.kernels.limits import blocks_fit, blocks_join
from lln.kernels.ops import fused_attention
from lln.observers import Announcement, announce, is_observed
from lln.precision import accumulation_dtype, cast_for_autocast, without_autocast


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
        beta: Likewise; also ``[B, Hk, 1, 1]``, and then query heads of a group share one summary.
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
        impl: ``"auto"``, ``"eager"`` (plain PyTorch), ``"triton"`` or ``"reference"`` (N×N in
            float64).

    Returns:
        ``[B, H, T, E]`` in the dtype of query (the autocast dtype under autocast). A sequence
        without any valid key gives zeros. NaN or infinity in a query shows in its row, in a key or
        value in its head; where α and β are matched, in a query in its head too.

    Raises:
        InvalidInputError: One sentence on what does not fit.
        BackendUnavailableError: If the implementation asked for cannot run.

    Example:
        >>> import torch
        >>> query, key, value = torch.randn(3, 2, 4, 10, 8)
        >>> lln_attention(query, key, value).shape
        torch.Size([2, 4, 10, 8])
    """
    query, key, value = cast_for_autocast(query, key, value)
    checks.check_qkv(query, key, value, layout="dense", enable_gqa=enable_gqa)
    checks.check_key_mask(key_mask, key)
    checks.check_causal(is_causal, query.shape[2], key.shape[2])
    checks.check_options(
        query,
        key,
        query.shape[0],
        alpha=alpha,
        beta=beta,
        matching=matching,
        dropout_p=dropout_p,
        is_causal=is_causal,
    )
    impl = choose_implementation(impl, query)
    with without_autocast(query):
        if alpha is None or beta is None:
            alpha, beta = match_inputs(query, key, matching, key_mask, impl)
        if is_observed():
            parts = {"alpha": alpha, "beta": beta, "key_mask": key_mask, "is_causal": is_causal}
            announce(Announcement("lln", query, key, **parts))
        if impl == "triton":
            return fused_attention(
                query,
                key,
                value,
                alpha=alpha,
                beta=beta,
                key_mask=key_mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
            )
        options = {"is_causal": is_causal, "dropout_p": dropout_p, "impl": impl}
        return run.long_range(query, key, value, alpha, beta, key_mask, **options)


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
        impl: As in `lln_attention`; ``"auto"`` takes plain PyTorch for blocks that do not fit the
            kernel's tiles, ``"triton"`` refuses them.

    Returns:
        ``[B, H, T, E]`` in the dtype of query. A block without any valid key gives zeros.
    """
    query, key, value = cast_for_autocast(query, key, value)
    checks.check_qkv(query, key, value, layout="dense", enable_gqa=enable_gqa)
    checks.check_self_attention(query, key, "block_diagonal_attention")
    checks.check_flag("is_causal", is_causal)
    checks.check_key_mask(key_mask, key)
    checks.check_block_size(block_size)
    checks.check_scale(scale)
    checks.check_dropout(dropout_p)
    if is_observed():
        parts = {"block_size": block_size, "key_mask": key_mask, "is_causal": is_causal}
        announce(Announcement("diag", query, key, scale=scale, **parts))
    chosen = choose_implementation(impl, query)
    rows = _rows_of(block_size, query, chosen)
    if chosen == "triton" and not blocks_fit(query, rows, False, key_mask is not None):
        if impl == "triton":
            masked = "" if key_mask is None else " with a key mask"
            raise BackendUnavailableError(
                f"impl='triton' has no tile for blocks of {rows} tokens by {query.shape[-1]} "
                f"channels{masked} here; use smaller blocks, or impl='auto' to let lln choose."
            )
        chosen = "eager"
    with without_autocast(query):
        if chosen == "triton":
            return fused_blocks(
                query,
                key,
                drop_keys(value, dropout_p),
                key_mask=key_mask,
                block_size=rows,
                scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
                is_causal=is_causal,
            )
        options = {"is_causal": is_causal, "dropout_p": dropout_p, "impl": chosen}
        options |= {"block_size": block_size, "scale": scale}
        return run.short_range(query, key, value, key_mask, **options)


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
    """LLN attention joined with block-diagonal softmax attention, the layer of Figure 3.

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
    query, key, value = cast_for_autocast(query, key, value)
    checks.check_qkv(query, key, value, layout="dense", enable_gqa=enable_gqa)
    checks.check_self_attention(query, key, "lln_diag_attention")
    checks.check_key_mask(key_mask, key)
    checks.check_options(
        query,
        key,
        query.shape[0],
        alpha=alpha,
        beta=beta,
        matching=matching,
        dropout_p=dropout_p,
        is_causal=is_causal,
    )
    block_size = query.shape[-1] if block_size is None else block_size
    checks.check_block_size(block_size)
    checks.check_scale(scale)
    checks.check_mix(mix, (*query.shape[:-1], value.shape[-1]), query.device)
    impl = choose_implementation(impl, query)
    with without_autocast(query):
        if alpha is None or beta is None:
            alpha, beta = match_inputs(query, key, matching, key_mask, impl)
        if is_observed():
            parts = {"alpha": alpha, "beta": beta, "key_mask": key_mask, "is_causal": is_causal}
            parts |= {"block_size": block_size, "mix": mix, "scale": scale}
            announce(Announcement("lln_diag", query, key, **parts))
        rows = _rows_of(block_size, query, impl)
        factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
        blocks = {"block_size": block_size, "scale": scale, "is_causal": is_causal}
        heads, mix_grad = query.shape[0] * query.shape[1], asks_gradient(mix)
        extras = key_mask is not None or has_channels(mix)
        if impl == "triton" and blocks_join(query, heads, rows, is_causal, mix_grad, extras):
            return fused_attention(
                query,
                key,
                value,
                alpha=alpha,
                beta=beta,
                key_mask=key_mask,
                mix=mix,
                block_size=rows,
                scale=factor,
                dropout_p=dropout_p,
                is_causal=is_causal,
            )
        if impl == "triton":
            # Blocks that do not fit the chip together with a summary run beside the kernel.
            value = drop_keys(value, dropout_p)
            shared = {"key_mask": key_mask, "is_causal": is_causal}
            long_range = fused_attention(query, key, value, alpha=alpha, beta=beta, **shared)
            if blocks_fit(query, rows, False, key_mask is not None):
                short_range = fused_blocks(
                    query, key, value, block_size=rows, scale=factor, **shared
                )
            else:
                short_range = run.short_range(query, key, value, key_mask, impl="eager", **blocks)
            dtype = accumulation_dtype(query.dtype)
            return run.join(long_range.to(dtype), short_range.to(dtype), mix).to(query.dtype)
        sides = (query, key, value, alpha, beta, key_mask, mix)
        return run.both_ranges(*sides, dropout_p=dropout_p, impl=impl, **blocks)


def _rows_of(block_size: int, query: Tensor, impl: str) -> int:
    """Tokens of the largest block that there is.

    Only the kernels ask: an exported program must not depend on which side of the block size the
    length lies.
    """
    return min(block_size, max(query.shape[2], 1)) if impl == "triton" else block_size
