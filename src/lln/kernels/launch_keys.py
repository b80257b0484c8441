"""Attention with exact keys from tensors to kernels: allocate, choose sizes, launch.

Dimension legend: B batch, H query heads, Hk key heads, SH summary heads, T tokens, D head width,
E value width, W tokens in a block, n blocks, G groups per head, K keys per group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.eager.key_blocks import blocks_in
from lln.kernels.call import Call, flat_scale, mask_bytes, precision_of
from lln.kernels.launch import summarise
from lln.kernels.launch_choice import gaps_before, launch
from lln.kernels.limits import multiprocessors, power_of_two
from lln.kernels.recipes import on_device
from lln.kernels.shapes import output_like
from lln.kernels.sizes import cdiv
from lln.kernels.triton import keys_grad, keys_read

# Bytes of the tiles in which chosen keys, and the gradients of pairs, are read.
TILE_BYTES = 8 * 1024
# Tiles that are fetched ahead.
STAGES = {"slot": 2, "key": 1}
# The pairs' gradients may take this share of the memory of query, key, value and their gradients.
PAIR_SHARE = 0.34


class KeysCall(NamedTuple):
    """One call.

    Attributes:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, T, D]``.
        value: ``[B, Hk, T, E]``.
        alpha: 4-D, broadcasts to ``[B, H, 1, 1]``; None = ``alpha_number``.
        beta: 4-D; None = ``beta_number``.
        offset: 4-D; None = ``offset_number``.
        indices: int32 ``[B, H, G, K]``, contiguous; -1 = none.
        mask: bool ``[B, T]`` or None.
        alpha_number: α where it is one number.
        beta_number: β where it is one number.
        offset_number: The offset where it is one number.
        block_size: W, a power of two.
        group_size: Queries in a group, a power of two.
        scale: Factor of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    alpha: Tensor | None
    beta: Tensor | None
    offset: Tensor | None
    indices: Tensor
    mask: Tensor | None
    alpha_number: float
    beta_number: float
    offset_number: float
    block_size: int
    group_size: int
    scale: float

    @property
    def as_lln(self) -> Call:
        """The call of LLN attention whose summary this one reads."""
        tensors = (self.query, self.key, self.value, self.alpha, self.beta, self.mask, None, None)
        numbers = (self.alpha_number, self.beta_number, 1.0, 0, 1.0, 0.0, 0, False, 0)
        return Call(*tensors, *numbers)

    @property
    def blocks(self) -> int:
        """N."""
        return blocks_in(self.query.shape[2], self.block_size, self.mask is not None)


def attend(call: KeysCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output ``[B, H, T, E]``, log-normalisers ``[B, H, T]``, log-mass, centroid and mean key."""
    query, key, value = call.query, call.key, call.value
    batch, heads, tokens, _ = query.shape
    out = output_like(query, value.shape[3])
    lse = torch.empty((batch, heads, tokens), device=query.device)
    log_mass, centroid = summarise(call.as_lln)
    centre = mean_key(call.key, call.mask)
    if out.numel() == 0:
        return out, lse, log_mass, centroid, centre
    groups, keys = call.indices.shape[2:]
    sizes = _sizes(call)
    with on_device(query.device):
        launch(
            keys_read.keys_read_kernel, (groups * batch * heads,),
            query, key, value, out, lse, _centred(call, log_mass, centre), centroid, centre,
            call.indices, *_side_tensors(call), flat_scale(call.alpha, batch, query),
            flat_scale(call.offset, batch, query), call.alpha_number, call.offset_number,
            call.scale, tokens, heads, groups, keys, *query.stride(), *key.stride(),
            *value.stride(), *out.stride(), **sizes, num_warps=_warps("read", sizes),
        )  # fmt: skip
    return out, lse, log_mass, centroid, centre


def mean_key(key: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of the keys that are not masked, float32 ``[B, Hk, D]``."""
    if mask is None:
        return key.sum(2, dtype=torch.float32) / max(key.shape[2], 1)
    kept = torch.where(mask[:, None, :, None], key, 0.0)
    number = mask.sum(-1, dtype=torch.float32).clamp_min(1)
    return kept.sum(2, dtype=torch.float32) / number[:, None, None]


def _centred(call: KeysCall, log_mass: Tensor, centre: Tensor) -> Tensor:
    """L - βμ of every summary, ``[B, SH, D]``."""
    slots = log_mass.shape[1]
    return log_mass - _beta(call, slots) * centre.repeat_interleave(slots // centre.shape[1], 1)


def _beta(call: KeysCall, slots: int) -> float | Tensor:
    """β ``[B or 1, SH, 1]``, or the number."""
    if call.beta is None:
        return call.beta_number
    return call.beta.float().repeat_interleave(slots // call.beta.shape[1], 1).squeeze(-1)


def attend_backward(
    call: KeysCall,
    gradient: Tensor,
    out: Tensor,
    lse: Tensor,
    log_mass: Tensor,
    centroid: Tensor,
    centre: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, and of α, β and the offset of every head, ``[B, H, 1, 1]``.

    That of β has one entry per summary head.
    """
    query, key, value = call.query, call.key, call.value
    batch, heads, tokens, width = query.shape
    key_heads, slots, device = key.shape[1], log_mass.shape[1], query.device
    dq, dk, dv = (torch.empty_like(side) for side in (query, key, value))
    if query.numel() == 0:
        zero = torch.zeros((batch, heads, 1, 1), device=device)
        return dq, dk, dv, zero, zero[:, :slots], zero
    groups, keys = call.indices.shape[2:]
    sizes, sides, blocks = _sizes(call), _side_tensors(call), call.blocks
    delta = torch.empty_like(lse)
    dc_parts, dl_parts, dm_parts, dalpha = _slot_gradients(
        call, gradient, out, dq, lse, delta, log_mass, centroid, centre
    )
    dc = dc_parts.unflatten(0, (-1, heads // slots)).sum((1, 2))
    dl = dl_parts.unflatten(0, (-1, heads // slots)).sum((1, 2))
    shift = dl - (centroid.flatten(0, 1) * dc).sum(-1)
    # μ enters the slots as -βμ, and every row as scale · q·μ.
    share = heads // key_heads
    through = (dl.view(batch, slots, width) * _beta(call, slots)).unflatten(1, (key_heads, -1))
    dcentre = dm_parts.unflatten(0, (-1, share)).sum((1, 2)) - through.sum(2).flatten(0, 1)
    dcentre = dcentre / _counts(call)
    dc = dc.to(value.dtype)
    beta = call.beta
    if beta is not None and beta.shape[1] != slots:
        beta = beta.repeat_interleave(slots // beta.shape[1], 1)
    dbeta = torch.empty((batch * slots, blocks), device=device)
    del dc_parts
    each = _heads_at_once(call)
    leads = [
        slice(first * share, min(first + each, batch * key_heads) * share)
        for first in range(0, batch * key_heads, each)
    ]
    # Before the pairs take their memory, because sorting needs some of its own.
    sorted_pairs = [_sort_pairs(call, lead) for lead in leads]
    pairs = each * share * groups * keys
    pair_dk = torch.empty((pairs, width), dtype=query.dtype, device=device)
    pair_dv = torch.empty((pairs, value.shape[3]), dtype=query.dtype, device=device)
    far = {name: sizes[name] for name in sizes if name not in ("SR", "HAS_ALPHA", "HAS_OFFSET")}
    near = {name: sizes[name] for name in far if name not in ("BM", "BK", "GROUP")}
    for lead, found in zip(leads, sorted_pairs, strict=True):
        first, count = lead.start // share, (lead.stop - lead.start) // share
        with on_device(device):
            launch(
                keys_grad.keys_far_kernel, (count * share * groups,), query, key, value, gradient,
                dq, lse, delta, call.indices, *sides[:2], pair_dk, pair_dv, call.scale,
                first * share, tokens, heads, groups, keys, *query.stride(), *key.stride(),
                *value.stride(), *gradient.stride(), *dq.stride(), **far,
                num_warps=_warps("far", sizes),
            )  # fmt: skip
            launch(
                keys_grad.keys_key_kernel, (blocks * count,), query, key, value, gradient, dk, dv,
                lse, delta, log_mass, dc, shift, dcentre, *sides[:2],
                flat_scale(beta, batch, query), dbeta, pair_dk, pair_dv, *found,
                call.beta_number, call.scale, first, tokens, heads, key_heads, keys, blocks,
                *query.stride(), *key.stride(), *value.stride(), *gradient.stride(),
                *dk.stride(), *dv.stride(), **near, SR=sizes["SR"], BP=_rows_at_once(call),
                HAS_BETA=call.beta is not None, STAGES=STAGES["key"],
                num_warps=_warps("key", sizes),
            )  # fmt: skip
    shape = (batch, heads, 1, 1)
    # β also stands before μ in the logits of the slots.
    mean = centre.repeat_interleave(slots // key_heads, 1).flatten(0, 1)
    of_beta = (dbeta.sum(-1) - (dl * mean).sum(-1)).view(batch, slots, 1, 1)
    # Every logit of a slot has the offset in it.
    of_offset = dl_parts.sum((1, 2)).view(shape)
    return dq, dk, dv, dalpha.sum(-1).view(shape), of_beta, of_offset


def _slot_gradients(
    call: KeysCall,
    gradient: Tensor,
    out: Tensor,
    dq: Tensor,
    lse: Tensor,
    delta: Tensor,
    log_mass: Tensor,
    centroid: Tensor,
    centre: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write δ and the slots' share of dq; dC, dL, the rows' share of dμ, and dα, in parts.

    Parts are ``[B·H, splits, …]``: every program has one.
    """
    query = call.query
    batch, heads, tokens, width = query.shape
    groups, keys = call.indices.shape[2:]
    device, sizes = query.device, _sizes(call)
    splits = min(groups, max(1, 8 * multiprocessors(device) // (batch * heads)))
    stretch = cdiv(groups, splits)
    splits = cdiv(groups, stretch)
    parts = (batch * heads, splits)
    dc = torch.empty((*parts, width, call.value.shape[3]), device=device)
    dl, dm = torch.empty((2, *parts, width), device=device)
    dalpha = torch.empty(parts, device=device)
    with on_device(device):
        launch(
            keys_grad.keys_slot_kernel, (batch * heads * splits,), query, out, gradient, dq, lse,
            delta, _centred(call, log_mass, centre), centroid, centre, call.indices,
            *_side_tensors(call), flat_scale(call.alpha, batch, query),
            flat_scale(call.offset, batch, query), dc, dl, dm, dalpha, call.alpha_number,
            call.offset_number, call.scale, tokens, heads, groups, keys, splits, stretch,
            *query.stride(), *out.stride(), *gradient.stride(), *dq.stride(), **sizes,
            STAGES=STAGES["slot"], num_warps=_warps("slot", sizes),
        )  # fmt: skip
    return dc, dl, dm, dalpha


def _counts(call: KeysCall) -> Tensor:
    """How many keys there are, at least 1: ``[B · Hk, 1]``."""
    batch, heads, tokens, _ = call.key.shape
    if call.mask is None:
        return call.key.new_full((batch * heads, 1), max(tokens, 1), dtype=torch.float32)
    number = call.mask.sum(-1, dtype=torch.float32).clamp_min(1)
    return number.repeat_interleave(heads)[:, None]


def _sort_pairs(call: KeysCall, lead: slice) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs (group, chosen key) of some heads, sorted by head and key.

    Returns:
        Which pair comes at every place, its key, and where the pairs of every block of keys begin,
        ``[heads, n + 1]``.
    """
    _, heads, tokens, _ = call.query.shape
    device = call.query.device
    chosen = call.indices.flatten(0, 1)[lead].flatten(1)
    count = chosen.shape[0]
    # Missing keys sort behind all others of their head.
    far = tokens + 1
    dtype = torch.int32 if count * far < 2**31 else torch.int64
    head = torch.arange(count, device=device, dtype=dtype)[:, None] * far
    keyed = torch.where(chosen < 0, tokens, chosen).to(dtype) + head
    ordered, order = keyed.flatten().sort(stable=True)
    bound = torch.arange(call.blocks + 1, device=device, dtype=dtype) * call.block_size
    bound = bound.expand(count, -1)
    if call.mask is not None:
        gap = gaps_before(call.mask, call.block_size, call.query).repeat_interleave(heads)[lead]
        bound = bound - gap[:, None].to(dtype)
    starts = torch.searchsorted(ordered, (bound.clamp(0, tokens) + head).flatten())
    return order.to(torch.int32), (ordered % far).to(torch.int32), starts.to(torch.int32)


def _heads_at_once(call: KeysCall) -> int:
    """How many key heads the backward takes at once, to bound the memory of the pairs."""
    query, key = call.query, call.key
    width = query.shape[3] + call.value.shape[3]
    pairs = query.shape[1] // key.shape[1] * call.indices.shape[2] * call.indices.shape[3]
    one = max(pairs * width * query.itemsize, 1)
    tensors = 2 * (query.nbytes + key.nbytes + call.value.nbytes)
    return max(1, min(int(tensors * PAIR_SHARE) // one, query.shape[0] * key.shape[1]))


def _sizes(call: KeysCall) -> dict[str, Any]:
    width, value_width = call.query.shape[3], call.value.shape[3]
    return {
        "W": call.block_size,
        "D": width,
        "E": value_width,
        "BD": max(16, power_of_two(width)),
        "BE": max(16, power_of_two(value_width)),
        "BM": max(16, call.group_size),
        "BW": max(16, call.block_size),
        "BK": max(16, min(_rows_at_once(call), power_of_two(call.indices.shape[3]))),
        "GROUP": call.group_size,
        "R": call.query.shape[1] // call.key.shape[1],
        "SR": call.query.shape[1] // call.as_lln.summary_heads,
        "HAS_ALPHA": call.alpha is not None,
        "HAS_OFFSET": call.offset is not None,
        "HAS_MASK": call.mask is not None,
        "EVEN": call.mask is None and call.query.shape[2] % call.block_size == 0,
        "PRECISION": precision_of(call.query, max(width, value_width)),
    }


def _rows_at_once(call: KeysCall) -> int:
    """Rows of a tile of chosen keys or pairs."""
    widest = max(call.query.shape[3], call.value.shape[3])
    rows = TILE_BYTES // (max(16, power_of_two(widest)) * call.query.itemsize)
    return max(16, min(64, rows))


def _side_tensors(call: KeysCall) -> tuple[Tensor, Tensor, Tensor]:
    """The mask as bytes, where the first blocks begin, and how many keys a sample has."""
    mask, query = call.mask, call.query
    if mask is None:
        return query, query, query
    held = mask.sum(-1, dtype=torch.int32)
    return mask_bytes(mask, query), gaps_before(mask, call.block_size, query), held


# Warps of a program; more for wide heads.
WARPS = {"read": 4, "slot": 4, "far": 4, "key": 4}


def _warps(kind: str, sizes: dict[str, Any]) -> int:
    is_wide = max(sizes["BD"], sizes["BE"]) > 64 or sizes["BM"] > 64
    return 8 if is_wide else WARPS[kind]
