"""α, β and the offset of attention with exact keys, found on real activations.

α and β are half of what `lln.calibrate` finds, because the slots carry only what is left beside the
exact keys. The offset then gives the slots the mass that softmax attention has outside the exact
keys. With the exact keys of row i (its block and its chosen keys) in E and the others in F,

    logit(mass of F) = ln Σ_F e^{q·k/√D} - ln Σ_E e^{q·k/√D}
    the same of the slots = g + ln ρ + ln Σ_f e^{αq_f + L_f} - ln Σ_E e^{q·k/√D}      (k centred)

and g is the median over rows of what makes both equal. E cancels.

Dimension legend: B batch, H heads, Hk key heads, T tokens, D head width, R sampled rows, K chosen
keys.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from lln import checks
from lln.checks.key_options import check_selection
from lln.checks.names import check_choice
from lln.eager.key_attention import log_share, slots_of_blocks
from lln.eager.key_blocks import KeyBlocks, dense_blocks, fit_blocks
from lln.eager.selection import choose, seen_keys
from lln.errors import CalibrationWarning
from lln.matching.calibration import (
    PAIR_BUDGET,
    count_tokens,
    find_temperatures,
    pool_moments,
    sampled_places,
    sentences_of_doubt,
)
from lln.matching.mass import REST_FACTOR, mass_offset
from lln.matching.moments import head_moments
from lln.precision import accumulation_dtype, without_autocast


def calibrate_keys(
    query: Tensor,
    key: Tensor,
    *,
    keys: int = 64,
    block_size: int = 64,
    select: str = "block",
    group_size: int | None = None,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scope: str = "head",
    rows: int = 256,
    steps: int = 14,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """α, β and offset that `lln.lln_keys_attention` needs to follow softmax attention here.

    Args:
        query: ``[B, H, T, D]``, activations of a real model.
        key: ``[B, Hk, T, D]``; H a multiple of Hk.
        keys: As the attention will choose them, and likewise the next three.
        block_size: Tokens in a block.
        select: How keys are chosen, see `lln.choose_keys`.
        group_size: Queries that share their keys; None = a block for ``"block"``, else 1.
        key_mask: bool ``[B, T]``, True = attend; it also says which queries count.
        is_causal: Whether row i sees keys 0 … i only.
        scope: ``"head"``: for every sample and head; ``"batch"``: one value per head for the whole
            batch, to freeze into a model.
        rows: Query rows of every sample to measure on, evenly spaced over the valid ones.
        steps: As in `lln.calibrate`.
        scale: Factor of the softmax scores; None = 1/√D.

    Returns:
        ``(alpha, beta, offset)``, each ``[B, H, 1, 1]`` (``[1, H, 1, 1]`` for scope ``"batch"``),
        detached. Where every key is exact, so that the slots have nothing to carry, the offset is
        the closed form of `lln.matching.mass`.

    Raises:
        InvalidInputError: If no sequence has two tokens.

    Warns:
        CalibrationWarning: As `lln.calibrate`, or if a block and its keys cover every sequence.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> query, key = torch.randn(2, 1, 1, 512, 32, generator=generator)
        >>> alpha, beta, offset = calibrate_keys(query, key, keys=32)
        >>> f"{alpha.item():.1f} {offset.item():.0f}"
        '0.9 -4'
    """
    checks.check_qkv(query, key, key, layout="dense", enable_gqa=True)
    checks.check_self_attention(query, key, "calibrate_keys")
    checks.check_key_mask(key_mask, key)
    checks.check_flag("is_causal", is_causal)
    checks.check_blocks(block_size, scale)
    checks.check_count("keys", keys, 0)
    group = check_selection(select, group_size, block_size)
    check_choice("scope", scope, ("head", "batch"))
    checks.check_count("rows", rows)
    checks.check_count("steps", steps)
    pooled = scope == "batch"
    alpha, beta = find_rest_temperatures(query, key, key_mask, pooled, rows, steps, scale)
    offset = find_offset(
        query,
        key,
        alpha,
        beta,
        key_mask,
        pooled,
        keys=keys,
        block_size=block_size,
        select=select,
        group_size=group,
        is_causal=is_causal,
        rows=rows,
        scale=scale,
    )
    sentences = sentences_of_doubt(query, key, key_mask, alpha, beta, pooled)
    longest = max(count_tokens(key, key_mask).tolist(), default=0)
    for sentence in (*sentences, *doubts_of_length(longest, block_size, keys)):
        warnings.warn(sentence, CalibrationWarning, stacklevel=2)
    return alpha, beta, offset


def doubts_of_length(longest: int, block_size: int, keys: int) -> list[str]:
    """A sentence that warns of sequences in which nearly every key is exact.

    Args:
        longest: Tokens of the longest sequence.
        block_size: Tokens in a block.
        keys: Exact keys outside of it.
    """
    if not 1 < longest <= block_size + keys:
        return []
    return [
        f"the longest of these sequences has {longest} tokens, and a row sees {block_size} in its "
        f"block and {keys} exact keys: next to nothing is left for the slots, so their offset is a "
        f"guess; calibrate on sequences as long as those to come, of more than "
        f"{block_size + keys} tokens."
    ]


def find_rest_temperatures(
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None,
    pooled: bool,
    rows: int = 256,
    steps: int = 14,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Half of what `lln.calibrate` finds, for checked arguments, without its warnings.

    It is asked with centred keys, as the slots are those of centred keys.
    """
    if key_mask is None:
        key = key - key.mean(2, keepdim=True)
    else:
        kept = key_mask[:, None, :, None]
        number = kept.sum(2, keepdim=True).clamp_min(1)
        key = key - (torch.where(kept, key, 0.0).sum(2, keepdim=True) / number).to(key.dtype)
    found = find_temperatures(query, key, key_mask, pooled, rows, steps, scale)
    return REST_FACTOR * found[0], REST_FACTOR * found[1]


def find_offset(
    query: Tensor,
    key: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    key_mask: Tensor | None,
    pooled: bool,
    *,
    keys: int,
    block_size: int,
    select: str,
    group_size: int,
    is_causal: bool = False,
    rows: int = 256,
    scale: float | None = None,
) -> Tensor:
    """The offset for given α and β, ``[B, H, 1, 1]``, pooled ``[1, H, 1, 1]``.

    Args:
        query: As in `calibrate_keys`.
        key: As in `calibrate_keys`.
        alpha: A number, or broadcasts to ``[B, H, 1, 1]``.
        beta: Likewise.
        key_mask: As in `calibrate_keys`.
        pooled: Whether the scope is ``"batch"``.
        keys: K.
        block_size: Tokens in a block.
        select: As in `calibrate_keys`.
        group_size: Queries that share their keys.
        is_causal: As in `calibrate_keys`.
        rows: As in `calibrate_keys`.
        scale: As in `calibrate_keys`.
    """
    with without_autocast(query), torch.no_grad():
        moments = head_moments(query, key, key_mask)
        if pooled:
            moments = pool_moments(moments)
        closed = mass_offset(moments, alpha, beta, query.shape[-1], scale)
        batch, heads, tokens, _ = query.shape
        if 0 in (batch, heads, tokens):
            return closed
        dtype = accumulation_dtype(query.dtype)
        query, key = query.detach().to(dtype), key.detach().to(dtype)
        block_size, group_size = fit_blocks(block_size, group_size, tokens)
        blocks = dense_blocks(batch, tokens, block_size, key_mask, query.device)
        indices = choose(
            query,
            key,
            keys,
            blocks,
            select=select,
            group_size=group_size,
            key_mask=key_mask,
            is_causal=is_causal,
            flip=scale is not None and scale < 0,
        )
        key = key.repeat_interleave(heads // key.shape[1], 1)
        if key_mask is not None:
            valid = key_mask[:, None, :, None]
            query, key = torch.where(valid, query, 0.0), torch.where(valid, key, 0.0)
        gaps = _gaps(
            query, key, alpha, beta, indices, blocks, key_mask, group_size, is_causal, rows, scale
        )
        if pooled:
            gaps = gaps.transpose(0, 1).flatten(1)[None]
        found = gaps.nanmedian(-1).values[..., None, None]
        return torch.where(found.isnan(), closed, found)


def _gaps(
    query: Tensor,
    key: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    indices: Tensor,
    blocks: KeyBlocks,
    key_mask: Tensor | None,
    group_size: int,
    is_causal: bool,
    rows: int,
    scale: float | None,
) -> Tensor:
    """The offset that every sampled row would need, ``[B, H, R]``; NaN where there is no rest."""
    batch, heads, tokens, width = query.shape
    scale = 1 / math.sqrt(width) if scale is None else scale
    alpha, beta = (
        side.to(query.dtype) if isinstance(side, Tensor) else side for side in (alpha, beta)
    )
    per_block = beta.unsqueeze(-1) if isinstance(beta, Tensor) and beta.dim() == 4 else beta
    # The centroids are not needed: one channel stands for the values.
    log_mass, _, centre = slots_of_blocks(
        key, key[..., :1], per_block, blocks, key_mask, None, is_causal
    )
    seen = seen_keys(indices, blocks, group_size, key_mask, is_causal)
    share = log_share(seen, blocks, group_size, key_mask, is_causal, query.dtype)
    share = blocks.scatter(share)
    # One column more than there are tokens, where keys go that a group does not see.
    chosen = torch.where(seen, indices, tokens)
    place = sampled_places(key_mask, batch, tokens, rows, query.device)
    per_group = blocks.place.shape[2] // group_size
    token = torch.arange(tokens, device=query.device)
    step = max(PAIR_BUDGET // (heads * tokens), 1)
    found = query.new_full((batch, heads, place.shape[1]), torch.nan)
    for sample in range(batch):
        home = blocks.home[sample]
        exists = token < tokens if key_mask is None else key_mask[sample]
        for start in range(0, place.shape[1], step):
            row = place[sample, start : start + step]
            sampled = row >= 0
            row = row.clamp_min(0)
            group = home[row] * per_group + blocks.within[sample, row] // group_size
            exact = torch.zeros(
                heads, row.shape[0], tokens + 1, dtype=torch.bool, device=key.device
            )
            exact.scatter_(-1, chosen[sample][:, group], True)
            rest = exists & ~exact[..., :tokens] & (home != home[row, None])
            if is_causal:
                rest = rest & (home < home[row, None])
            scores = scale * query[sample][:, row] @ key[sample].mT
            true = torch.where(rest, scores, -torch.inf).logsumexp(-1)
            asked, own = query[sample][:, row], home[row]
            level = scale * (asked * centre[sample][:, own]).sum(-1, keepdim=True)
            slots = _of_sample(alpha, sample) * asked + log_mass[sample][:, own] + level
            gap = true - slots.logsumexp(-1) - share[sample][:, row, 0]
            there = rest.any(-1) & exists[row] & sampled
            found[sample, :, start : start + step] = torch.where(there, gap, torch.nan)
    return found


def _of_sample(side: float | Tensor, sample: int) -> float | Tensor:
    """What broadcasts to ``[H, 1, 1]`` for one sample."""
    if not isinstance(side, Tensor) or side.dim() < 4:
        return side
    return side[sample if side.shape[0] > 1 else 0]
