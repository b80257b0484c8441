"""Exact keys without gradients on a CPU: the same attention by PyTorch's own fused softmax.

Slots become D more keys (`lln.eager.key_attention` has the formula): one with the vector
μ + αe_f/scale has the score αq_f + scale·q·μ, and what remains of its logit, the same for all
queries of a group, is added as a mask. No matrix of logits is written to memory.

Dimension legend: see `lln.eager.key_attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Instruments replace the function in its module to see a model's softmax attention. This one is a
# step of another attention, which announces itself: the name is bound before any of them looks.
from torch.nn.functional import scaled_dot_product_attention

from lln.eager.key_terms import KeyTerms
from lln.eager.summary import LOG_ZERO
from lln.precision import accumulation_dtype
from lln.tracing import has_values

# Numbers of keys, and of values, that are laid out at once.
MOST_NUMBERS = 1 << 20


def can_fuse(*sides: object, scale: float, is_causal: bool) -> bool:
    """Whether `attend_without_gradients` computes a call.

    Args:
        sides: All tensors that could need a gradient; numbers among them do not.
        scale: Slots are scaled by its inverse.
        is_causal: The mask of a causal block differs from row to row.
    """
    tensors = [side for side in sides if isinstance(side, Tensor)]
    if is_causal or scale <= 0 or not all(map(has_values, tensors)):
        return False
    if any(
        side.device.type != "cpu" or accumulation_dtype(side.dtype) != torch.float32
        for side in tensors
    ):
        return False
    return not (torch.is_grad_enabled() and any(side.requires_grad for side in tensors))


def attend_without_gradients(
    terms: KeyTerms, share: Tensor, indices: Tensor, seen: Tensor
) -> Tensor:
    """The attention of `lln.eager.key_attention.attend_keys`: ``[B, H, T, E]``.

    Args:
        terms: The call; its scale is above zero.
        share: Ln ρ, ``[B, H, n, W, 1]``, one number per group.
        indices: int ``[B, H, G, K]``; -1 = none.
        seen: bool ``[B, H, G, K]``, which of them a group may attend to.
    """
    query, key, value, alpha = terms.query, terms.key, terms.value, terms.alpha
    (blocks, group_size, key_mask, _), scale = terms.groups, terms.factor
    valid = blocks.valid(key_mask)
    width, value_width = query.shape[-1], value.shape[-1]
    count, size = blocks.place.shape[1:]
    rows = blocks.gather(query).flatten(2, 3).unflatten(2, (-1, group_size))
    lead = rows.shape[:3]

    def of_groups(side: Tensor) -> Tensor:
        """One entry per block, or one for all → one per group ``[B·H, G, …]``."""
        if side.shape[2] > 1 and group_size < size:
            side = side.repeat_interleave(size // group_size, 2)
        return side.expand(*lead, *side.shape[3:]).flatten(0, 1)

    log_mass, centroid, centre = terms.slots
    axes = torch.eye(width, dtype=query.dtype) / scale
    # What is added to the slots' logits.
    level = (share + terms.offset)[:, :, :, ::group_size, 0].flatten(2, 3).unsqueeze(-1)
    hidden = torch.cat([of_groups(valid[:, None]), seen.flatten(0, 1)], -1).logical_not_()
    bias = hidden.to(query.dtype).mul_(LOG_ZERO)
    bias = torch.cat([bias, of_groups(log_mass) + level.flatten(0, 1)], -1).unsqueeze(-2)
    near = [of_groups(_hide(blocks.gather(side), valid[:, None])) for side in (key, value)]
    slot_rows = [of_groups(alpha * axes + centre.unsqueeze(-2)), of_groups(centroid)]
    known, seen = torch.where(seen, indices, 0).flatten(0, 1), seen.flatten(0, 1)
    rows, sides = rows.flatten(0, 1), [side.flatten(0, 1) for side in (key, value)]

    # A few heads at a time in the same memory: to touch new memory takes longer than to copy.
    heads, width_of_one = rows.shape[0], bias.shape[-1] * max(width, value_width)
    each = max(1, min(MOST_NUMBERS // max(lead[2] * width_of_one, 1), heads))
    shape = (each, lead[2], bias.shape[-1])
    space = [rows.new_empty(*shape, side.shape[-1]) for side in sides]
    out = rows.new_empty(*rows.shape[:3], value_width)
    for first in range(0, heads, each):
        part = slice(first, first + each)
        keys, values = (held[: heads - first] for held in space)
        for held, side, own, linear in zip((keys, values), sides, near, slot_rows, strict=True):
            far = _hide(_rows(side[part], known[part]), seen[part])
            torch.cat([own[part], far, linear[part]], -2, out=held)
        out[part] = scaled_dot_product_attention(
            rows[part], keys, values, attn_mask=bias[part], scale=scale
        )
    return blocks.scatter(out.view(*lead[:2], count, size, value_width))


def _hide(rows: Tensor, kept: Tensor) -> Tensor:
    """Zero the rows that are not attended to: a NaN in one would survive a weight of zero."""
    return rows if bool(kept.all()) else torch.where(kept.unsqueeze(-1), rows, 0.0)


def _rows(side: Tensor, known: Tensor) -> Tensor:
    """The rows of ``[h, T, D]`` at ``[h, G, K]``, copied whole: ``[h, G, K, D]``."""
    heads, tokens, width = side.shape
    first = torch.arange(heads).view(heads, 1, 1) * tokens
    found = side.reshape(-1, width).index_select(0, (known + first).flatten())
    return found.view(*known.shape, width)
