"""The entry points for packed sequences: ``[T, H, D]`` with ``cu_seqlens``, no padding anywhere.

Sequence s holds the tokens ``cu_seqlens[s] … cu_seqlens[s + 1] − 1`` and attends to itself only.
Time and memory are linear in T whatever the mix of lengths (`lln.eager.packing`).

Dimension legend: T packed tokens, H query heads, Hk key heads, D head width, E value width,
n sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lln import checks
from lln.checks.packed import check_cu_seqlens, check_max_seqlen
from lln.checks.signatures import explain_misfits
from lln.eager.causal import CHUNK, LEAF, attend_chunks
from lln.eager.diagonal import asks_gradient, attend_blocks, has_channels
from lln.eager.dropout import drop_keys
from lln.eager.packing import Tiling, cut_tiles
from lln.eager.run import join, repeat_heads
from lln.eager.scan import running_merge
from lln.eager.summary import key_exponents, read, summarise
from lln.errors import InvalidInputError
from lln.functional.dense import lln_attention, lln_diag_attention
from lln.functional.match import match_packed
from lln.functional.plan import choose_implementation
from lln.kernels.limits import blocks_join
from lln.kernels.ops import fused_attention
from lln.observers import Announcement, announce, is_observed
from lln.precision import accumulation_dtype, cast_for_autocast, without_autocast


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
        >>> query, key, value = torch.randn(3, 10, 2, 8)
        >>> lln_attention_varlen(query, key, value, torch.tensor([0, 3, 10])).shape
        torch.Size([10, 2, 8])
    """
    query, key, value = cast_for_autocast(query, key, value)
    _check_packed(query, key, value, cu_seqlens, key_mask, enable_gqa)
    longest = check_max_seqlen(max_seqlen, cu_seqlens, query.shape[0])
    checks.check_options(
        query,
        key,
        cu_seqlens.shape[0] - 1,
        alpha=alpha,
        beta=beta,
        matching=matching,
        dropout_p=dropout_p,
        is_causal=is_causal,
    )
    impl = choose_implementation(impl, query)
    with without_autocast(query):
        if alpha is None or beta is None:
            alpha, beta = match_packed(query, key, cu_seqlens, longest or 0, matching, impl)
        if query.shape[0] == 0:
            return _nothing(query, key, value, alpha, beta)
        if impl == "reference":
            own = {"alpha": alpha, "beta": beta}
            shared = {"is_causal": is_causal, "dropout_p": dropout_p, "enable_gqa": enable_gqa}
            shared |= {"impl": impl}
            return _one_by_one(lln_attention, query, key, value, cu_seqlens, own, **shared)
        if is_observed():
            parts = {"alpha": alpha, "beta": beta, "is_causal": is_causal, "cu_seqlens": cu_seqlens}
            announce(Announcement("lln", query, key, **parts))
        if impl == "triton":
            return _fused(
                query,
                key,
                value,
                alpha=alpha,
                beta=beta,
                dropout_p=dropout_p,
                is_causal=is_causal,
                bounds=cu_seqlens,
                longest=longest or query.shape[0],
            )
        packed = _widen(query, key, value, dropout_p)
        out = _long_range(*packed, cu_seqlens.long(), longest, alpha, beta, is_causal)
        return out.to(query.dtype)


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

    Blocks start anew with every sequence.

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
    _check_packed(query, key, value, cu_seqlens, key_mask, enable_gqa)
    longest = check_max_seqlen(max_seqlen, cu_seqlens, query.shape[0])
    checks.check_options(
        query,
        key,
        cu_seqlens.shape[0] - 1,
        alpha=alpha,
        beta=beta,
        matching=matching,
        dropout_p=dropout_p,
        is_causal=is_causal,
    )
    block_size = query.shape[-1] if block_size is None else block_size
    checks.check_block_size(block_size)
    checks.check_scale(scale)
    checks.check_mix(mix, (*query.shape[:2], value.shape[-1]), query.device)
    impl = choose_implementation(impl, query)
    with without_autocast(query):
        if alpha is None or beta is None:
            alpha, beta = match_packed(query, key, cu_seqlens, longest or 0, matching, impl)
        if query.shape[0] == 0:
            return _nothing(query, key, value, alpha, beta)
        if impl == "reference":
            own = {"alpha": alpha, "beta": beta, "mix": mix}
            shared = {"is_causal": is_causal, "dropout_p": dropout_p, "enable_gqa": enable_gqa}
            shared |= {"block_size": block_size, "scale": scale, "impl": impl}
            return _one_by_one(lln_diag_attention, query, key, value, cu_seqlens, own, **shared)
        if is_observed():
            parts = {"alpha": alpha, "beta": beta, "is_causal": is_causal, "cu_seqlens": cu_seqlens}
            parts |= {"block_size": block_size, "mix": mix, "scale": scale}
            announce(Announcement("lln_diag", query, key, **parts))
        rows = block_size if longest is None else min(block_size, longest)
        fused = {"is_causal": is_causal, "bounds": cu_seqlens, "longest": longest or query.shape[0]}
        heads = (cu_seqlens.shape[0] - 1) * query.shape[1]
        asked = (is_causal, asks_gradient(mix), has_channels(mix))
        if impl == "triton" and blocks_join(query, heads, rows, *asked):
            if isinstance(mix, Tensor):
                mix = mix.reshape((1,) * (3 - mix.dim()) + tuple(mix.shape)).transpose(0, 1)[None]
            return _fused(
                query,
                key,
                value,
                alpha=alpha,
                beta=beta,
                mix=mix,
                block_size=rows,
                scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
                dropout_p=dropout_p,
                **fused,
            )
        bounds = cu_seqlens.long()
        if impl == "triton":
            # Blocks that do not fit the chip together with a summary run beside the kernel.
            value = drop_keys(value.transpose(0, 1), dropout_p).transpose(0, 1)
            long_range = _fused(query, key, value, alpha=alpha, beta=beta, **fused)
            packed = _widen(query, key, value, 0.0)
            long_range = long_range.to(packed[0].dtype)
        else:
            packed = _widen(query, key, value, dropout_p)
            long_range = _long_range(*packed, bounds, longest, alpha, beta, is_causal)
        tiling = cut_tiles(bounds, query.shape[0], rows)
        blocks = attend_blocks(
            *(tiling.gather(tensor) for tensor in packed),
            scale=scale,
            token_mask=tiling.valid,
            is_causal=is_causal,
        )
        return join(long_range, tiling.scatter(blocks), mix).to(query.dtype)


def _fused(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """The kernels take packed sequences as one sample whose bounds they know."""
    dense = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return fused_attention(*dense, **options)[0].transpose(0, 1)


def _long_range(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int | None,
    alpha: float | Tensor,
    beta: float | Tensor,
    is_causal: bool,
) -> Tensor:
    # Chunks are powers of two, and no shorter than the causal form's leaves.
    chunk = CHUNK
    if longest is not None:
        chunk = min(CHUNK, max(LEAF, 1 << (longest - 1).bit_length()))
    tiling = cut_tiles(bounds, query.shape[0], chunk)
    exponent_q = tiling.gather(query) * _per_tile(alpha, tiling, query)
    exponent_k, values = key_exponents(
        tiling.gather(key), tiling.gather(value), _per_tile(beta, tiling, query), tiling.valid
    )
    if is_causal:
        return tiling.scatter(attend_chunks(exponent_q, exponent_k, values, tiling.sequence))
    log_mass, centroid = running_merge(*summarise(exponent_k, values), tiling.sequence)
    return tiling.scatter(
        read(exponent_q, log_mass[..., tiling.last, :], centroid[..., tiling.last, :, :])
    )


def _nothing(
    query: Tensor, key: Tensor, value: Tensor, alpha: float | Tensor, beta: float | Tensor
) -> Tensor:
    """The output ``[0, H, E]`` of no tokens, through which gradients of zero still flow."""
    zero = key.sum() * value.sum()
    for scale in (alpha, beta):
        zero = zero * (scale.sum() if isinstance(scale, Tensor) else scale)
    rows = query.sum(-1, keepdim=True).expand(-1, -1, value.shape[-1])
    return (rows * zero).to(query.dtype)


def _per_tile(scale: float | Tensor, tiling: Tiling, query: Tensor) -> float | Tensor:
    """A temperature ``[n, H, 1, 1]`` for every tile: ``[H, tiles, 1, 1]``."""
    if not isinstance(scale, Tensor):
        return scale
    scale = scale.to(query.dtype).reshape((1,) * (4 - scale.dim()) + tuple(scale.shape))
    if scale.shape[0] > 1:
        scale = scale[tiling.sequence.clamp_max(scale.shape[0] - 1)]
    scale = scale.transpose(0, 1)
    return scale if scale.shape[0] == 1 else repeat_heads(scale, query.shape[1], dim=0)


def _widen(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(query.dtype)
    value = drop_keys(value.to(dtype).transpose(0, 1), dropout_p).transpose(0, 1)
    heads = query.shape[1]
    return query.to(dtype), repeat_heads(key.to(dtype), heads), repeat_heads(value, heads)


def _one_by_one(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    own: dict[str, float | Tensor],
    **shared: Any,
) -> Tensor:
    """The reference: one dense call per sequence.

    ``own`` holds what differs between sequences: α, β ``[n, H, 1, 1]`` and a mix ``[T, H, E]``.
    """
    outs = []
    for index, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        dense = (tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value))
        part = {name: _of_sequence(name, side, index, start, end) for name, side in own.items()}
        outs.append(attend(*dense, **part, **shared)[0].transpose(0, 1))
    return torch.cat(outs)


def _of_sequence(
    name: str, side: float | Tensor, index: int, start: int, end: int
) -> float | Tensor:
    if not isinstance(side, Tensor):
        return side
    if name == "mix":
        side = side.reshape((1,) * (3 - side.dim()) + tuple(side.shape))
        return (side if side.shape[0] == 1 else side[start:end]).transpose(0, 1)[None]
    return side if side.dim() < 4 or side.shape[0] == 1 else side[index : index + 1]


def _check_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    key_mask: None,
    enable_gqa: bool,
) -> None:
    checks.check_qkv(query, key, value, layout="packed", enable_gqa=enable_gqa)
    check_cu_seqlens(cu_seqlens, query.shape[0], query.device)
    if key_mask is not None:
        raise InvalidInputError(
            "key_mask and cu_seqlens cannot be combined: packed sequences carry no padding; drop "
            "the masked tokens before packing, or use the dense function with key_mask."
        )
