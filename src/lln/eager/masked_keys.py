"""Exact keys by all scores and a mask, where every query has keys of its own.

To lay out the chosen keys of every query by itself takes far longer than to multiply. PyTorch's
fused softmax attention computes the scores of all keys, block by block, and a mask hides those that
a query did not choose. The sum is the same.

Slots become D more keys (`lln.eager.key_attention` has the formula). Queries get two channels more,
one and their level/scale: a slot with the vector [μ + αe_f/scale, (L_f - βμ_f)/scale, 1] then has
its logit as a score, so that all gradients come from the same pass.

Dimension legend: see `lln.eager.key_attention`; R queries at once, S = T + D keys with the slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.eager.fused_softmax import aligned, softmax_attention, softmax_attention_gradients
from lln.eager.key_terms import KeyTerms
from lln.eager.saved_numbers import by_autograd
from lln.precision import accumulation_dtype
from lln.tracing import is_batched, is_untraced

# Numbers of a mask that are laid out at once: in a CPU's caches, or enough to fill a GPU.
MOST_NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 28}

# How many scores take the time of one row that is copied (measured at 64 channels).
SCORES_PER_ROW = 80

# Slots are scaled by the inverse, which must not overflow.
LEAST_SCALE = 1e-6


def can_mask(*sides: object, is_causal: bool, scale: float) -> bool:
    """Whether `attend_masked` computes a dense call.

    Args:
        sides: All tensors of the call that could need a gradient; numbers among them do not.
        is_causal: Only sequences that are not causal have one row of slots for all blocks.
        scale: Factor of the scores.
    """
    if is_causal or scale < LEAST_SCALE:
        return False
    tensors = [side for side in sides if isinstance(side, Tensor)]
    fits = all(
        side.numel()
        and accumulation_dtype(side.dtype) == torch.float32
        and side.device.type in MOST_NUMBERS
        for side in tensors
    )
    return fits and is_untraced(*tensors)


def mask_pays(tokens: int, exact_keys: int, width: int) -> bool:
    """Whether all scores take less time than copies of the keys, where every query has its own.

    Args:
        tokens: T.
        exact_keys: How many keys a query sees, in its block and chosen.
        width: D, as many slots.
    """
    return tokens + width <= SCORES_PER_ROW * (exact_keys + width)


def attend_masked(terms: KeyTerms, share: Tensor, indices: Tensor, seen: Tensor) -> Tensor:
    """The attention of `lln.eager.key_attention.attend_keys`: ``[B, H, T, E]``.

    Args:
        terms: The call: groups of one query, and one row of slots for all blocks.
        share: Ln ρ, ``[B, H, n, W, 1]``.
        indices: int ``[B, H, n · W, K]``; -1 = none.
        seen: bool ``[B, H, n · W, K]``, which of them a query may attend to.
    """
    query, key, value, alpha = terms.query, terms.key, terms.value, terms.alpha
    (blocks, _, key_mask, _), scale = terms.groups, terms.factor
    tokens, width, value_width = query.shape[2], query.shape[3], value.shape[3]
    log_mass, centroid, centre = (side.squeeze(2) for side in terms.slots)
    factor = alpha.squeeze(2) if isinstance(alpha, Tensor) else alpha
    # What is added to the slots' logits.
    level = blocks.scatter(share + terms.offset)
    if key_mask is not None:
        # A NaN in one that is hidden would survive a weight of zero.
        kept = key_mask[:, None, :, None]
        key, value = torch.where(kept, key, 0.0), torch.where(kept, value, 0.0)
        # Of a sample that is all padding nothing but slots is left, whose centroids are zero. Their
        # logits must not be so large that the backward pass cannot repeat them.
        some = key_mask.any(-1)[:, None, None]
        log_mass = torch.where(some, log_mass, 0.0)
        level = torch.where(some.unsqueeze(-1), level, 0.0)
    vectors = factor * (torch.eye(width, device=query.device) / scale) + centre.unsqueeze(-2)
    known, level = (log_mass / scale).unsqueeze(-1), level / scale
    rows = torch.cat([query, torch.ones_like(level), level], -1)
    linear = torch.cat([vectors, known, torch.ones_like(known)], -1)
    keys = torch.cat([F.pad(key, (0, linear.shape[-1] - width)), linear], 2)
    values = torch.cat([value, centroid], 2)
    # The fused attention wants one width.
    most = aligned(max(keys.shape[-1], value_width), query.device)
    rows, keys, values = (F.pad(side, (0, most - side.shape[-1])) for side in (rows, keys, values))
    # Who is not seen points at a slot, which every query sees.
    chosen = torch.where(seen, indices, tokens)
    if not blocks.is_plain:
        place = blocks.home * blocks.place.shape[2] + blocks.within
        place = place[:, None, :, None].expand(-1, chosen.shape[1], -1, chosen.shape[3])
        chosen = chosen.gather(2, place)
    # The same for a query's own block.
    near = torch.where(blocks.valid(key_mask), blocks.place, tokens)
    near = near.gather(1, blocks.home.unsqueeze(-1).expand(-1, -1, near.shape[2]))
    out = _Masked.apply(rows, keys, values, chosen, near[:, None], scale)
    return out[..., :value_width]


def _masks(chosen: Tensor, near: Tensor, keys: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Stretches of queries with their masks ``[B, H, R, S]``, all in the same memory.

    Args:
        chosen: int ``[B, H, T, K]``, keys that a query sees.
        near: int ``[B, 1, T, W]``, likewise.
        keys: ``[B, H, S, ·]``; the last D are slots.
    """
    batch, heads, tokens, _ = chosen.shape
    size = keys.shape[2]
    stretch = max(64, MOST_NUMBERS[keys.device.type] // (batch * heads * size))
    # New memory takes longer to touch than to fill again.
    room = aligned(size, keys.device)
    space = keys.new_zeros(batch, heads, min(stretch, tokens), room)[..., :size]
    for first in range(0, tokens, stretch):
        part = slice(first, min(first + stretch, tokens))
        mask = space[:, :, : part.stop - first]
        mask[..., :tokens].fill_(-torch.inf)
        mask.scatter_(-1, near[:, :, part].expand(-1, heads, -1, -1), 0.0)
        yield part, mask.scatter_(-1, chosen[:, :, part], 0.0)


class _Masked(torch.autograd.Function):
    """Softmax attention to the near and the chosen keys and to all slots.

    Masks are made again for the backward pass: together they are as large as all weights.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, scale = inputs
        rows, keys, values, chosen, near = tensors
        found = [
            softmax_attention(rows[:, :, part], keys, values, mask, scale)
            for part, mask in _masks(chosen, near, keys)
        ]
        parts, norms = zip(*found, strict=True)
        out = torch.cat(parts, 2)
        ctx.save_for_backward(*tensors, out, *norms)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        rows, keys, values, chosen, near, out, *norms = ctx.saved_tensors
        if torch.is_grad_enabled() or is_batched(gradient):

            def again(rows: Tensor, keys: Tensor, values: Tensor) -> Tensor:
                weights = [
                    (rows[:, :, part] @ keys.mT * ctx.scale + mask.clone()).softmax(-1)
                    for part, mask in _masks(chosen, near, keys)
                ]
                return torch.cat(weights, 2) @ values

            sides, needs = (rows, keys, values), ctx.needs_input_grad[:3]
            return *by_autograd(again, sides, needs, gradient), *_NONE
        dq: list[Tensor] = []
        dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
        for norm, (part, mask) in zip(norms, _masks(chosen, near, keys), strict=True):
            own = (rows[:, :, part], keys, values, mask, out[:, :, part], norm)
            found = softmax_attention_gradients(gradient[:, :, part], *own, ctx.scale)
            dq.append(found[0])
            dk += found[1]
            dv += found[2]
        return torch.cat(dq, 2), dk, dv, *_NONE


# The gradients of what says where keys are, and of the scale.
_NONE = (None,) * 3
