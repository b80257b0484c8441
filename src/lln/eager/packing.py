"""Packed sequences in plain PyTorch: cut into tiles, computed side by side, put back.

Time and memory are linear in T whatever the mix of lengths (`lln.eager.tiling`).

Dimension legend: as in `lln.checks.call`, with T packed tokens.
"""

from __future__ import annotations

from torch import Tensor

from lln.checks.call import Call
from lln.eager.band import places_of
from lln.eager.causal import CHUNK, LEAF, attend_chunks
from lln.eager.diagonal import attend_blocks
from lln.eager.dropout import drop_keys
from lln.eager.infinity import as_nan
from lln.eager.key_attention import KeyTerms, attend_keys, slots_of_sequences
from lln.eager.key_blocks import Groups, packed_blocks
from lln.eager.run import join, near_range, repeat_heads
from lln.eager.scan import running_merge
from lln.eager.summary import key_exponents, read, summarise
from lln.eager.tiling import cut_tiles
from lln.precision import accumulation_dtype


def attend_packed(call: Call) -> Tensor:
    """LLN attention inside every sequence, combined with its blocks, or windows: ``[T, H, E]``.

    Args:
        call: A packed call without exact keys, α and β known; of one kind or of both, but for
            ``"diag"`` see `short_range`.
    """
    assert call.bounds is not None
    dtype, longest = accumulation_dtype(call.query.dtype), call.longest
    query, key = as_nan(call.query.to(dtype)), as_nan(call.key.to(dtype))
    value = drop_keys(call.value.to(dtype).transpose(0, 1), call.dropout_p).transpose(0, 1)
    if call.kind == "window":
        places = places_of(call.bounds, query.shape[0], call.window)
        query, key, value = (side.transpose(0, 1)[None] for side in (query, key, value))
        out = near_range(call.replace(query=query, key=key, value=value), places)
        return out[0].transpose(0, 1).to(call.query.dtype)
    rows = call.block_size if longest is None else min(call.block_size, longest)
    wide = call.replace(query=query, key=key, value=value, block_size=rows)
    out = _long_range(wide)
    if rows:
        out = join(out, short_range(wide), call.mix)
    return out.to(call.query.dtype)


def attend_packed_keys(call: Call) -> Tensor:
    """A packed call with exact keys, all of it known: ``[T, H, E]``."""
    assert call.bounds is not None
    dtype, tokens = accumulation_dtype(call.query.dtype), call.query.shape[0]
    query, key, value = (side.to(dtype).transpose(0, 1)[None] for side in call.qkv)
    query, key, heads = as_nan(query), as_nan(key), query.shape[1]
    blocks, sequence = packed_blocks(call.bounds.long(), tokens, call.block_size)
    key, value = repeat_heads(key, heads), repeat_heads(value, heads)
    alpha, beta, offset = (
        side.unsqueeze(0) if isinstance(side, Tensor) else side
        for side in (
            per_tile(number, sequence, query) for number in (call.alpha, call.beta, call.offset)
        )
    )
    groups = Groups(blocks, call.group_size)
    slots = slots_of_sequences(key, value, beta, groups, sequence)
    terms = KeyTerms(query, key, value, alpha, offset, slots, groups, call.scale)
    return attend_keys(terms, call.keys[None])[0].transpose(0, 1).to(call.query.dtype)


def short_range(call: Call) -> Tensor:
    """Block-diagonal attention; every sequence starts a new block: ``[T, H, E]``."""
    assert call.bounds is not None
    query, heads = call.query, call.query.shape[1]
    dtype = accumulation_dtype(query.dtype)
    tiles = cut_tiles(call.bounds.long(), query.shape[0], call.block_size)
    sides = (query, repeat_heads(call.key, heads), repeat_heads(call.value, heads))
    blocks = (tiles.gather(side.to(dtype)) for side in sides)
    options = {"scale": call.scale, "is_causal": call.is_causal}
    return tiles.scatter(attend_blocks(*blocks, token_mask=tiles.valid, **options))


def _long_range(call: Call) -> Tensor:
    assert call.bounds is not None
    query, heads = call.query, call.query.shape[1]
    key, value = repeat_heads(call.key, heads), repeat_heads(call.value, heads)
    # Chunks are powers of two, and at least as long as the smallest blocks of the causal form.
    chunk = CHUNK
    if call.longest is not None:
        chunk = min(CHUNK, max(LEAF, 1 << (call.longest - 1).bit_length()))
    tiles = cut_tiles(call.bounds.long(), query.shape[0], chunk)
    alpha, beta = (per_tile(side, tiles.sequence, query) for side in (call.alpha, call.beta))
    exponent_q = tiles.gather(query) * alpha
    exponent_k, values = key_exponents(tiles.gather(key), tiles.gather(value), beta, tiles.valid)
    if call.is_causal:
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
