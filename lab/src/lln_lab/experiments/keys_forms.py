"""Dense forms of attention with exact keys: how keys are chosen, read, and α, β and g found.

Prototypes over masks of all pairs of tokens, nobody's kernels. `keys_prototype` has the equation
and measures them on a trained model.

Dimension legend: B texts, H heads, N tokens, R query rows, D head width, W block, K keys.
"""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import lln
from lln.errors import CalibrationWarning
from lln.matching.calibration import pool_moments
from lln.matching.moments import head_moments

WINDOW = 64

# Pairs of a query and a key, over 64, that are measured with dense masks in one head and text: all
# blocks of 512 tokens, 4 of 24 at 1,536. Fitting and errors would take most of the time otherwise.
MOST_PAIRS = 4096
FEWEST_BLOCKS = 4

# Tried by "grid" around the median, in nats.
OFFSETS = torch.arange(-4.0, 4.01, 0.25).tolist()
FACTORS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0)


@dataclass(frozen=True)
class Form:
    """How a layer's softmax is replaced.

    Attributes:
        kind: "softmax", "diag", "average" (of LLN and Diag) or "keys" (the form above).
        choice: Who chooses the keys: "none", "random", "group64" (the block's mean query),
            "group32", "group16", "group8", "query", "half" or "oracle".
        keys: K.
        slots: Whether the rest is there.
        factor: Of the entropy-matched α and β; None = the best of `FACTORS` for every head.
        offset: How g is found: "median", "grid" (least error of the output) or "closed".
        share: Whether ln(share) is added to the slots' logits.
        source: Activations that g is found on: "softmax" model's or "converted" model's own.
        centred: Whether the keys' mean over the tokens is taken off first. Softmax does not change,
            the slots do.
        bias: Whether the mean error of every head's output on the training texts is taken off.
        fit_tokens: Length of the texts to find α, β and g on; None = that of the measurement.
    """

    kind: str = "keys"
    choice: str = "group64"
    keys: int = 64
    slots: bool = True
    factor: float | None = 0.5
    offset: str = "median"
    share: bool = True
    source: str = "softmax"
    centred: bool = False
    bias: bool = False
    fit_tokens: int | None = None


class Inputs(NamedTuple):
    """Query, key and value of a layer, ``[B, H, N, D]`` each."""

    query: Tensor
    key: Tensor
    value: Tensor


class Fitted(NamedTuple):
    """Numbers of a layer: α, β, g ``[H, 1, 1]``, the bias of the output ``[H, 1, D]``."""

    alpha: Tensor
    beta: Tensor
    offset: Tensor
    bias: Tensor | float


class Exact(NamedTuple):
    """Softmax over the exact tokens of R queries.

    Attributes:
        out: ``[B, H, R, D]``.
        mass: ``[B, H, R, 1]``, logarithm of the sum of its exponentials.
        rest: The same of the tokens that are not exact; None where it was not computed.
        share: ln of the share of the tokens that are not exact, broadcasts to ``[B, H, R, 1]``.
    """

    out: Tensor
    mass: Tensor
    rest: Tensor | None
    share: Tensor | float


# ----------------------------------------------------------------------------- choosing keys


def strongest(score: Tensor, keys: int) -> Tensor:
    """Mask of the ``keys`` largest entries of every row."""
    mask = torch.zeros_like(score, dtype=torch.bool)
    return mask.scatter_(-1, score.topk(keys, dim=-1).indices, True)


def group_scores(query: Tensor, key: Tensor, group: int) -> Tensor:
    """Mean query of every ``group`` neighbours against all keys, ``[B, H, R / group, N]``."""
    return query.unflatten(2, (-1, group)).mean(3) @ key.mT


def by_group(query: Tensor, key: Tensor, near: Tensor, keys: int, group: int) -> Tensor:
    score = group_scores(query, key, group).masked_fill(near[::group], -math.inf)
    return strongest(score, keys).repeat_interleave(group, 2)


def by_query(query: Tensor, key: Tensor, keys: int) -> Tensor:
    """Of each query's two strongest signed features the K / 2 keys that have most of it.

    Centring the keys does not change their order in a feature.
    """
    signed = torch.cat([key, -key], -1).mT
    listed = strongest(signed, keys // 2)
    two = strongest(torch.cat([query, -query], -1), 2)
    # A product instead of two gathers of whole rows: several times faster.
    return two.to(query.dtype) @ listed.to(query.dtype) > 0


def by_mass(query: Tensor, key: Tensor, near: Tensor, keys: int) -> Tensor:
    """Oracle: the keys with the largest sum of softmax weights over the block."""
    weight = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
    score = weight.unflatten(2, (-1, WINDOW)).sum(3).masked_fill(near[::WINDOW], -math.inf)
    return strongest(score, keys).repeat_interleave(WINDOW, 2)


def exact_tokens(query: Tensor, key: Tensor, near: Tensor, choice: str, keys: int) -> Tensor:
    """Mask ``[B, H, R, N]`` of the near and the chosen tokens.

    Args:
        query: ``[B, H, R, D]``, whole blocks.
        key: ``[B, H, N, D]``.
        near: bool ``[R, N]``, True inside the query's block.
        choice: As in `Form`.
        keys: K.
    """
    if choice == "none" or keys == 0:
        return near.expand(*query.shape[:3], -1)
    if choice == "random":
        score = torch.rand(*query.shape[:2], query.shape[2] // WINDOW, key.shape[2])
        score = score.masked_fill(near[::WINDOW], -math.inf)
        return near | strongest(score, keys).repeat_interleave(WINDOW, 2)
    if choice == "query":
        return near | by_query(query, key, keys)
    if choice == "half":
        half = by_group(query, key, near, keys // 2, WINDOW)
        return near | half | by_query(query, key, keys // 2)
    if choice == "oracle":
        return near | by_mass(query, key, near, keys)
    return near | by_group(query, key, near, keys, int(choice.removeprefix("group")))


# ----------------------------------------------------------------------------- the form


def dense_exact(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, measure_rest: bool = True
) -> Exact:
    """Softmax over the tokens of a mask ``[B, H, R, N]``, and the mass of all others."""
    score = query @ key.mT * query.shape[-1] ** -0.5
    inside = score.masked_fill(~mask, -math.inf)
    mass = inside.logsumexp(-1, keepdim=True)
    out = (inside - mass).exp_() @ value
    share = (~mask).sum(-1, keepdim=True).div(mask.shape[-1]).log()
    if not measure_rest:
        return Exact(out, mass, None, share)
    rest = score.masked_fill_(mask, -math.inf).logsumexp(-1, keepdim=True)
    return Exact(out, mass, rest, share)


def gathered_exact(query: Tensor, key: Tensor, value: Tensor, keys: int, group: int) -> Exact:
    """The same for keys chosen by groups, computed on gathered rows: cheaper for a whole model."""
    tokens, width = query.shape[2:]
    blocks = [side.unflatten(2, (-1, WINDOW)) for side in (query, key, value)]
    scale = width**-0.5
    near = (blocks[0] @ blocks[1].mT).flatten(2, 3) * scale
    if keys == 0:
        mass = near.logsumexp(-1, keepdim=True)
        weight = (near - mass).exp_().unflatten(2, (-1, WINDOW))
        return Exact((weight @ blocks[2]).flatten(2, 3), mass, None, math.log1p(-WINDOW / tokens))
    own = near_mask(tokens, torch.arange(tokens))[::group]
    index = group_scores(query, key, group).masked_fill_(own, -math.inf).topk(keys, -1).indices
    place = index.flatten(2)[..., None].expand(-1, -1, -1, width)
    chosen = [side.gather(2, place).unflatten(2, (-1, keys)) for side in (key, value)]
    far = (query.unflatten(2, (-1, group)) @ chosen[0].mT).flatten(2, 3) * scale
    logits = torch.cat([near, far], -1)
    mass = logits.logsumexp(-1, keepdim=True)
    near_weight, far_weight = logits.sub_(mass).exp_().split([WINDOW, keys], -1)
    out = (near_weight.unflatten(2, (-1, WINDOW)) @ blocks[2]).flatten(2, 3)
    out += (far_weight.unflatten(2, (-1, group)) @ chosen[1]).flatten(2, 3)
    left = tokens - WINDOW - keys
    return Exact(out, mass, None, math.log(left / tokens) if left > 0 else -math.inf)


def near_mask(tokens: int, rows: Tensor) -> Tensor:
    """Bool ``[R, N]``, True where a token lies in the row's block."""
    return rows[:, None] // WINDOW == torch.arange(tokens)[None] // WINDOW


def read_slots(
    query: Tensor, key: Tensor, value: Tensor, alpha: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """LLN attention and the logarithm of its row sums, ``[B, H, R, D]`` and ``[B, H, R, 1]``."""
    exponent = beta * key
    log_mass = exponent.logsumexp(-2, keepdim=True)
    centroid = (exponent - log_mass).exp_().mT @ value
    logits = alpha * query + log_mass
    mass = logits.logsumexp(-1, keepdim=True)
    return (logits - mass).exp_() @ centroid, mass


def mix(exact: Exact, slots: Tensor, slot_mass: Tensor, offset: Tensor, share: bool) -> Tensor:
    """One softmax over the exact tokens and the slots, written as the mean of both by mass."""
    gain = slot_mass + offset - exact.mass
    weight = torch.sigmoid(gain + exact.share if share else gain)
    return exact.out + weight * (slots - exact.out)


def attend(recipe: Form, inputs: Inputs, fitted: Fitted | None) -> Tensor:
    """A layer's attention for all its queries."""
    if recipe.kind == "softmax":
        return F.scaled_dot_product_attention(*inputs)
    query, key, value = centre(inputs) if recipe.centred else inputs
    if recipe.choice.startswith("group") or recipe.keys == 0:
        group = int(recipe.choice.removeprefix("group")) if recipe.keys else WINDOW
        exact = gathered_exact(query, key, value, recipe.keys, group)
    else:
        near = near_mask(key.shape[2], torch.arange(query.shape[2]))
        mask = exact_tokens(query, key, near, recipe.choice, recipe.keys)
        exact = dense_exact(query, key, value, mask, measure_rest=False)
    if fitted is None or not recipe.slots:
        return exact.out
    slots, mass = read_slots(query, key, value, fitted.alpha, fitted.beta)
    if recipe.kind == "average":
        return (exact.out + slots) / 2
    return mix(exact, slots, mass, fitted.offset, recipe.share) + fitted.bias


def centre(inputs: Inputs) -> Inputs:
    return inputs._replace(key=inputs.key - inputs.key.mean(2, keepdim=True))


# ----------------------------------------------------------------------------- finding α, β and g


class Temperatures(NamedTuple):
    """Entropy-matched α and β, ``[H, 1, 1]``, and the second moments σq² and σk²."""

    alpha: Tensor
    beta: Tensor
    query_variance: Tensor
    key_variance: Tensor


def match_entropy(inputs: Inputs) -> Temperatures:
    with warnings.catch_warnings():
        # One head of the model attends to a single token, on every text.
        warnings.simplefilter("ignore", CalibrationWarning)
        alpha, beta = lln.calibrate(inputs.query, inputs.key, scope="batch", rows=128)
    moments = pool_moments(head_moments(inputs.query, inputs.key))
    variances = (side[0, :, None, None] for side in (moments.query_variance, moments.key_variance))
    return Temperatures(alpha[0], beta[0], *variances)


def closed_offset(matched: Temperatures, alpha: Tensor, width: int) -> Tensor:
    """G = p/2 − ln D − s², which matches the masses of Gaussian inputs."""
    score_variance = matched.query_variance * matched.key_variance
    spread_square = alpha.square() * matched.query_variance
    return score_variance / 2 - math.log(width) - spread_square


def sampled(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Queries of evenly spaced blocks, and the mask of their own blocks."""
    tokens = inputs.key.shape[2]
    blocks = tokens // WINDOW
    count = min(blocks, max(MOST_PAIRS // tokens, FEWEST_BLOCKS))
    kept = ((torch.arange(count) + 0.5) * blocks / count).long()
    rows = (kept[:, None] * WINDOW + torch.arange(WINDOW)).flatten()
    return inputs.query[:, :, rows], near_mask(tokens, rows)


def texts_of(inputs: Inputs) -> Iterator[Inputs]:
    """One text at a time: a mask over all pairs of many would not fit."""
    for text in range(len(inputs.query)):
        yield Inputs(*(side[text : text + 1] for side in inputs))


def measure_exact(recipe: Form, inputs: Inputs) -> tuple[Exact, Tensor, Tensor]:
    """The exact part of sampled queries of all texts, those queries, softmax's output for them."""
    found, queries, targets = [], [], []
    for text in texts_of(inputs):
        query, near = sampled(text)
        mask = exact_tokens(query, text.key, near, recipe.choice, recipe.keys)
        found.append(dense_exact(query, text.key, text.value, mask))
        queries.append(query)
        targets.append(F.scaled_dot_product_attention(query, text.key, text.value))
    exact = Exact(*(torch.cat(side) for side in zip(*found, strict=True)))
    return exact, torch.cat(queries), torch.cat(targets)


def per_head(tensor: Tensor) -> Tensor:
    """``[B, H, R, D]`` → ``[H, 1, 1]``: norm of everything of a head."""
    return tensor.square().sum((0, 2, 3)).sqrt()[:, None, None]


def least_error(exact: Exact, slots: Tensor, mass: Tensor, start: Tensor, target: Tensor) -> Tensor:
    """The offset of every head around ``start`` with the smallest error of the output."""
    best, error = start, torch.full_like(start, math.inf)
    for step in OFFSETS:
        found = per_head(mix(exact, slots, mass, start + step, True) - target)
        best = torch.where(found < error, start + step, best)
        error = torch.minimum(error, found)
    return best


def fit(recipe: Form, inputs: Inputs, matched: Temperatures) -> Fitted | None:
    """The numbers of a layer, from its inputs on training texts."""
    if recipe.kind in ("softmax", "diag") or not recipe.slots:
        return None
    factor = recipe.factor or 0.5
    alpha, beta = factor * matched.alpha, factor * matched.beta
    if recipe.kind == "average":
        return Fitted(alpha, beta, torch.zeros_like(alpha), 0.0)
    width = inputs.query.shape[-1]
    if recipe.offset == "closed":
        return Fitted(alpha, beta, closed_offset(matched, alpha, width), 0.0)
    if recipe.centred:
        inputs = centre(inputs)
    exact, query, target = measure_exact(recipe, inputs)

    def candidate(factor: float) -> tuple[Fitted, Tensor]:
        alpha, beta = factor * matched.alpha, factor * matched.beta
        slots, mass = read_slots(query, inputs.key, inputs.value, alpha, beta)
        # ln of true far mass over LLN's: the logit of the far mass, less the difference of the
        # log-masses of slots and exact tokens, in which the exact ones cancel.
        gap = (exact.rest - mass - exact.share).transpose(0, 1).flatten(1)
        offset = gap.median(-1).values[:, None, None]
        if recipe.offset == "grid":
            offset = least_error(exact, slots, mass, offset, target)
        out = mix(exact, slots, mass, offset, True)
        bias = (target - out).mean((0, 2))[:, None] if recipe.bias else 0.0
        return Fitted(alpha, beta, offset, bias), per_head(target - out)

    if recipe.factor is not None:
        return candidate(recipe.factor)[0]
    found = [candidate(factor) for factor in FACTORS]
    best = torch.stack([error for _, error in found]).argmin(0, keepdim=True)
    sides = zip(*(fitted[:3] for fitted, _ in found), strict=True)
    return Fitted(*(torch.stack(side).gather(0, best)[0] for side in sides), 0.0)
