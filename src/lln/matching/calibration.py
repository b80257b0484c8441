"""α and β for real activations, found by measuring instead of by formula.

The curves behind `lln.match_moments` assume Gaussian entries. Heavy tails or varying token norms
violate that (errors of several bits of entropy), so `calibrate` measures the entropy of softmax
attention on a sample of query rows, then bisects s = α·σq = β·σk until LLN attention has the same
entropy on the same rows.

Dimension legend: B batch, H heads, T queries, S keys, D head width, R sampled rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from lln import checks
from lln.checks.names import check_choice
from lln.eager.summary import LOG_ZERO
from lln.errors import CalibrationWarning, InvalidInputError
from lln.matching.moments import Moments, head_moments
from lln.precision import accumulation_dtype, without_autocast

# Search interval of ln s: e^-5 gives uniform attention up to rounding, e^5 one-hot attention.
LOG_SPREAD_RANGE = (-5.0, 5.0)

# Tokens to measure one pair of α and β on. Between equal heads (Gaussian draws, widths 8 to 64) α
# varies by 50–85 % at 2 tokens, 25–40 % at 4, 14–20 % at 8, 9–14 % at 16, 5–9 % at 32, 4–8 % at 64
# and 2–4 % at 256; with heavy tails single values at 2 or 3 tokens are a hundred times too large.
# From this number on, chance changes α by less than a tenth.
ENOUGH_TOKENS = 64

# Upper limit of s = α·σq. Gaussian heads need 0.5 to 4, those of all-MiniLM-L6-v2 1.4 to 7, except
# one that attends to a single token (43). No lower limit: any small s gives uniform attention.
USUAL_SPREAD = 20.0

# Rows × keys computed at a time, over all heads of the slice: 16M floats.
PAIR_BUDGET = 1 << 24


def calibrate(
    query: Tensor,
    key: Tensor,
    *,
    key_mask: Tensor | None = None,
    scope: str = "head",
    rows: int = 256,
    steps: int = 14,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """α and β that give LLN attention the row entropy of softmax attention here, Eq. (7).

    Args:
        query: ``[B, H, T, D]``, activations of a real model.
        key: ``[B, Hk, S, D]``; H a multiple of Hk.
        key_mask: bool ``[B, S]``, True = attend; if T = S it also says which queries count.
        scope: ``"head"``: for every sample and head; ``"batch"``: one value per head for the whole
            batch, to freeze into a model.
        rows: Query rows to measure on, evenly spaced over the valid ones.
        steps: Number of times to halve the search interval of ln s; 14 leave it 0.0006 wide.
        scale: Factor of the softmax scores; None = 1/√D.

    Returns:
        ``(alpha, beta)``, each ``[B, H, 1, 1]`` (``[1, H, 1, 1]`` for scope ``"batch"``), detached;
        1 where queries or keys are constant.

    Raises:
        InvalidInputError: If no sequence has two tokens: with one, α and β have no effect.

    Warns:
        CalibrationWarning: If a pair was measured on fewer than 64 tokens, or is far larger than
            usual.
    """
    checks.check_qkv(query, key, key, layout="dense", enable_gqa=True)
    checks.check_key_mask(key_mask, key)
    checks.check_scale(scale)
    check_choice("scope", scope, ("head", "batch"))
    checks.check_count("rows", rows)
    checks.check_count("steps", steps)
    pooled = scope == "batch"
    alpha, beta = find_temperatures(query, key, key_mask, pooled, rows, steps, scale)
    for sentence in sentences_of_doubt(query, key, key_mask, alpha, beta, pooled):
        warnings.warn(sentence, CalibrationWarning, stacklevel=2)
    return alpha, beta


def sentences_of_doubt(
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None,
    alpha: Tensor,
    beta: Tensor,
    pooled: bool,
) -> list[str]:
    """What to warn of after temperatures were found on these inputs."""
    if key.numel() == 0:
        return []
    tokens = count_tokens(key, key_mask)
    behind = int(tokens.sum()) if pooled else int(tokens[tokens > 0].min())
    sharp = unusual(query, key, key_mask, alpha)
    most = [side[sharp].max().item() if sharp.any() else 0.0 for side in (alpha, beta)]
    return doubts(behind, int(sharp.sum()), sharp.numel(), *most)


def count_tokens(key: Tensor, key_mask: Tensor | None) -> Tensor:
    """Valid tokens of every sequence, ``[B]``."""
    if key_mask is not None:
        return key_mask.sum(-1)
    return torch.full((key.shape[0],), key.shape[2], device=key.device)


def check_tokens(key: Tensor, key_mask: Tensor | None) -> None:
    """Refuse inputs with at most one token per sequence: α and β have no effect on them."""
    longest = max(count_tokens(key, key_mask).tolist(), default=0)
    if longest < 2 and key.shape[0] > 0:
        raise InvalidInputError(
            "α and β need a sequence with two tokens to choose between, the longest one has "
            f"{longest}; calibrate on longer sequences."
        )


def unusual(query: Tensor, key: Tensor, key_mask: Tensor | None, alpha: Tensor) -> Tensor:
    """Which of the temperatures are far larger than those of other heads, bool like ``alpha``."""
    moments = scoped_moments(query, key, key_mask, alpha.shape[0] == 1)
    spread = alpha * moments.query_variance.sqrt()[..., None, None]
    return ~moments.degenerate[..., None, None] & (spread > USUAL_SPREAD)


def doubts(tokens: int, sharp: int, heads: int, alpha: float, beta: float) -> list[str]:
    """Sentences that warn about temperatures α and β that may be wrong.

    Args:
        tokens: How many one pair was measured on.
        sharp: Number of heads whose temperatures are `unusual`.
        heads: Number of all heads.
        alpha: The largest unusual α.
        beta: The largest unusual β.
    """
    found = []
    if tokens < ENOUGH_TOKENS:
        found.append(
            f"α and β of a head rest on {tokens} tokens, too few to trust; calibrate on "
            f"{ENOUGH_TOKENS} or more, best on a few dozen texts as the model will read them."
        )
    if sharp:
        found.append(
            f"{sharp} of {heads} heads got α up to {alpha:.0f} and β up to {beta:.0f}, far above "
            f"the usual (α·σq under {USUAL_SPREAD:.0f}): they attend to nearly a single token on "
            "these inputs; see whether they do so on others."
        )
    return found


@torch.no_grad()
def find_temperatures(
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None,
    pooled: bool,
    rows: int = 256,
    steps: int = 14,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`calibrate` for checked arguments, without its warnings; pooled = scope ``"batch"``."""
    check_tokens(key, key_mask)
    with without_autocast(query):
        moments = scoped_moments(query, key, key_mask, pooled)
        dtype = accumulation_dtype(query.dtype)
        query_std = torch.where(moments.degenerate, 1.0, moments.query_variance).sqrt()
        key_std = torch.where(moments.degenerate, 1.0, moments.key_variance).sqrt()
        query_mask = key_mask if query.shape[2] == key.shape[2] else None
        query, sampled = _sample_rows(query, query_mask, rows)
        query = query.to(dtype)
        key = key.to(dtype)
        if key.shape[1] != query.shape[1]:
            key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        if key_mask is not None:
            keep = key_mask[:, None, :, None]
            key = torch.where(keep, key, 0.0)
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale

        sides = (query, sampled, key, key_mask)
        target = _mean_entropy(*sides, _softmax_entropy, scale, scale, pooled)
        low = torch.full_like(target, LOG_SPREAD_RANGE[0])
        high = torch.full_like(target, LOG_SPREAD_RANGE[1])
        for _ in range(steps):
            middle = (low + high) / 2
            alpha, beta = (middle.exp() / std for std in (query_std, key_std))
            found = _mean_entropy(*sides, _lln_entropy, alpha, beta, pooled)
            too_flat = found > target
            low, high = torch.where(too_flat, middle, low), torch.where(too_flat, high, middle)
        spread = ((low + high) / 2).exp()
        alpha = torch.where(moments.degenerate, 1.0, spread / query_std)
        beta = torch.where(moments.degenerate, 1.0, spread / key_std)
        return alpha[..., None, None], beta[..., None, None]


def scoped_moments(query: Tensor, key: Tensor, key_mask: Tensor | None, pooled: bool) -> Moments:
    """The statistics that a scope asks for: ``[B, H]``, pooled ``[1, H]``."""
    moments = head_moments(query, key, key_mask)
    return pool_moments(moments) if pooled else moments


def pool_moments(moments: Moments) -> Moments:
    """One value per head for the whole batch, samples weighted by valid tokens: ``[1, H]``."""
    weight = moments.keys / moments.keys.sum(0, keepdim=True).clamp_min(1)
    there = moments.keys > 0
    return Moments(
        torch.where(there, moments.query_variance * weight, 0.0).sum(0, keepdim=True),
        torch.where(there, moments.key_variance * weight, 0.0).sum(0, keepdim=True),
        moments.keys.mean(0, keepdim=True),
        moments.degenerate.all(0, keepdim=True),
    )


def _sample_rows(
    query: Tensor, query_mask: Tensor | None, rows: int
) -> tuple[Tensor, Tensor | None]:
    """``[B, H, R, D]``, evenly spaced valid rows, and bool ``[B, R]``, which exist; None = all."""
    batch, heads, tokens, width = query.shape
    place = sampled_places(query_mask, batch, tokens, rows, query.device)
    if query_mask is None:
        return (query[:, :, place[0]] if batch else query[:, :, : place.shape[1]]), None
    there = place >= 0
    place = place.clamp_min(0)[:, None, :, None].expand(batch, heads, -1, width)
    return torch.where(there[:, None, :, None], query.gather(2, place), 0.0), there


def sampled_places(
    mask: Tensor | None, batch: int, tokens: int, rows: int, device: torch.device
) -> Tensor:
    """Evenly spaced valid rows of every sample, int ``[B, R]``; -1 where there are fewer.

    Of a padded sample they are those of the sample without its padding.
    """

    def spaced(count: int) -> Tensor:
        most = min(rows, count)
        return torch.linspace(0, max(count - 1, 0), most, device=device).round().long()

    if mask is None:
        return spaced(tokens).expand(batch, -1)
    places = torch.full((batch, min(rows, tokens)), -1, device=device)
    for own, valid in zip(places, mask, strict=True):
        found = valid.nonzero().squeeze(-1)
        taken = spaced(found.shape[0])
        own[: taken.shape[0]] = found[taken]
    return places


def _mean_entropy(
    query: Tensor,
    sampled: Tensor | None,
    key: Tensor,
    key_mask: Tensor | None,
    row_entropy: Callable[..., Tensor],
    alpha: float | Tensor,
    beta: float | Tensor,
    pooled: bool,
) -> Tensor:
    """Mean entropy of the sampled rows in nats, ``[B, H]`` or ``[1, H]``, computed in slices."""
    batch, heads, rows, _ = query.shape
    valid, counted = (
        None if side is None else side[:, None].expand(batch, heads, -1).flatten(0, 1)
        for side in (key_mask, sampled)
    )
    alpha, beta = (
        side.expand(batch, heads).reshape(-1, 1, 1) if isinstance(side, Tensor) else side
        for side in (alpha, beta)
    )
    pairs = max(rows * key.shape[2], 1)
    size = max(PAIR_BUDGET // pairs, 1)
    found = []
    for start in range(0, batch * heads, size):
        part = slice(start, start + size)
        own = [side[part] if isinstance(side, Tensor) else side for side in (alpha, beta)]
        mask = None if valid is None else valid[part]
        entropy = row_entropy(query.flatten(0, 1)[part], key.flatten(0, 1)[part], mask, *own)
        if counted is None:
            found.append(entropy.mean(-1))
        else:
            total = torch.where(counted[part], entropy, 0.0).sum(-1)
            found.append(total / counted[part].sum(-1).clamp_min(1))
    entropies = torch.cat(found).view(batch, heads) if found else query.new_zeros(batch, heads)
    if not pooled:
        return entropies
    there = torch.ones(batch, 1, dtype=torch.bool, device=query.device)
    if key_mask is not None:
        there = key_mask.any(-1, keepdim=True)
    total = torch.where(there, entropies, 0.0).sum(0, keepdim=True)
    return total / there.sum().clamp_min(1)


def _softmax_entropy(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float, _: float
) -> Tensor:
    scores = scale * query @ key.mT
    if mask is not None:
        scores = torch.where(mask.unsqueeze(-2), scores, LOG_ZERO)
    return torch.special.entr(scores.softmax(-1)).sum(-1)


def _lln_entropy(
    query: Tensor, key: Tensor, mask: Tensor | None, alpha: Tensor, beta: Tensor
) -> Tensor:
    """P = A·B, softmax over the slots times softmax over the tokens (see `lln.eager.summary`)."""
    exponent = key * beta
    if mask is not None:
        exponent = torch.where(mask.unsqueeze(-1), exponent, LOG_ZERO)
    slots = (query * alpha + exponent.logsumexp(-2, keepdim=True)).softmax(-1)
    return torch.special.entr(slots @ exponent.softmax(-2).mT).sum(-1)
