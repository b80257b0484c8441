"""Packed sequences in plain PyTorch: cut into tiles, computed side by side, put back.

Time and memory are linear in T whatever the mix of lengths (`lln.eager.tiling`).

Dimension legend: T packed tokens, H query heads, Hk key heads, D head width, E value width,
n packed sequences.
"""

from __future__ import annotations

from torch import Tensor

from lln.eager.causal import CHUNK, LEAF, attend_chunks
from lln.eager.diagonal import attend_blocks
from lln.eager.dropout import drop_keys
from lln.eager.infinity import as_nan
from lln.eager.run import join, repeat_heads
from lln.eager.scan import running_merge
from lln.eager.summary import key_exponents, read, summarise
from lln.eager.tiling import cut_tiles
from lln.precision import accumulation_dtype


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    *,
    alpha: float | Tensor,
    beta: float | Tensor,
    mix: float | Tensor = 1.0,
    block_size: int = 0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    longest: int | None = None,
) -> Tensor:
    """LLN attention inside every sequence, combined with its diagonal blocks: ``[T, H, E]``.

    Args:
        query: ``[T, H, D]``.
        key: ``[T, Hk, D]``.
        value: ``[T, Hk, E]``.
        bounds: ``cu_seqlens`` ``[n + 1]``.
        alpha: A number, or broadcasts to ``[n, H, 1, 1]``.
        beta: Likewise, or to ``[n, Hk, 1, 1]``.
        mix: Weight of the LLN part; broadcasts to ``[T, H, E]``.
        block_size: Tokens in a diagonal block; 0 = there are none.
        scale: Factor of the blocks' scores; None = 1/√D.
        dropout_p: Probability to drop a key, for both parts.
        is_causal: Whether a token sees only itself and earlier tokens of its sequence.
        longest: Length of the longest sequence, or more; None = unknown.
    """
    dtype, bounds = accumulation_dtype(query.dtype), bounds.long()
    value = drop_keys(value.to(dtype).transpose(0, 1), dropout_p).transpose(0, 1)
    wide = (as_nan(query.to(dtype)), as_nan(key.to(dtype)), value)
    out = _long_range(*wide, bounds, longest, alpha, beta, is_causal)
    if block_size:
        rows = block_size if longest is None else min(block_size, longest)
        options = {"block_size": rows, "scale": scale, "is_causal": is_causal}
        out = join(out, short_range(*wide, bounds, **options), mix)
    return out.to(query.dtype)


def short_range(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    *,
    block_size: int,
    scale: float | None,
    is_causal: bool,
) -> Tensor:
    """Block-diagonal attention; every sequence starts a new block: ``[T, H, E]``."""
    dtype, heads = accumulation_dtype(query.dtype), query.shape[1]
    tiles = cut_tiles(bounds.long(), query.shape[0], block_size)
    sides = (query.to(dtype), *(repeat_heads(side.to(dtype), heads) for side in (key, value)))
    blocks = attend_blocks(
        *(tiles.gather(side) for side in sides),
        scale=scale,
        token_mask=tiles.valid,
        is_causal=is_causal,
    )
    return tiles.scatter(blocks)


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
    heads = query.shape[1]
    key, value = repeat_heads(key, heads), repeat_heads(value, heads)
    # Chunks are powers of two, and at least as long as the smallest blocks of the causal form.
    chunk = CHUNK
    if longest is not None:
        chunk = min(CHUNK, max(LEAF, 1 << (longest - 1).bit_length()))
    tiles = cut_tiles(bounds, query.shape[0], chunk)
    exponent_q = tiles.gather(query) * per_tile(alpha, tiles.sequence, query)
    exponent_k, values = key_exponents(
        tiles.gather(key), tiles.gather(value), per_tile(beta, tiles.sequence, query), tiles.valid
    )
    if is_causal:
        return tiles.scatter(attend_chunks(exponent_q, exponent_k, values, tiles.sequence))
    log_mass, centroid = running_merge(*summarise(exponent_k, values), tiles.sequence)
    return tiles.scatter(
        read(exponent_q, log_mass[..., tiles.last, :], centroid[..., tiles.last, :, :])
    )


def per_tile(scale: float | Tensor, sequence: Tensor, query: Tensor) -> float | Tensor:
    """A temperature ``[n, H, 1, 1]`` for every tile: ``[H, tiles, 1, 1]``.

    Args:
        scale: The temperature; one value per key head is repeated for its query heads.
        sequence: int ``[tiles]``, the sequence of every tile.
        query: Has the heads in axis 1, and the dtype.
    """
    if not isinstance(scale, Tensor):
        return scale
    scale = scale.to(query.dtype).reshape((1,) * (4 - scale.dim()) + tuple(scale.shape))
    if scale.shape[0] > 1:
        scale = scale[sequence.clamp_max(scale.shape[0] - 1)]
    scale = scale.transpose(0, 1)
    return scale if scale.shape[0] == 1 else repeat_heads(scale, query.shape[1], dim=0)
