"""Attention with exact keys from tensors to kernels: allocate, choose sizes, launch.

Dimension legend: B batch, H query heads, Hk key heads, SH summary heads, T tokens, D head width,
E value width, W tokens in a block, n blocks, G groups per head, K keys per group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.kernels.call import flat_scale, precision_of
from lln.kernels.keys_call import KeysCall
from lln.kernels.launch_choice import launch
from lln.kernels.launch_slots import gather, summarise
from lln.kernels.limits import multiprocessors, power_of_two
from lln.kernels.recipes import on_device
from lln.kernels.shapes import output_like
from lln.kernels.sizes import cdiv
from lln.kernels.triton import keys_grad, keys_read

# Bytes of the tiles in which chosen keys, and the gradients of pairs, are read.
TILE_BYTES = 8 * 1024
# Pairs whose blocks a program finds.
PAIRS_AT_ONCE = 1024
# Tiles that are fetched ahead.
STAGES = {"slot": 3, "key": 1}
# Programs of the slots' gradients per multiprocessor, and tokens in a tile.
SLOT_PROGRAMS = 4
SLOT_ROWS = 64
_OF_SLOTS = ("D", "E", "BD", "BE", "GROUP", "SR", "HAS_ALPHA", "HAS_BETA", "HAS_MASK", "PRECISION")
# The pairs' gradients may take this share of the memory of query, key, value and their gradients.
PAIR_SHARE = 0.34


def attend(call: KeysCall) -> tuple[Tensor, ...]:
    """Output ``[B, H, T, E]``, and what the backward needs.

    That is: log-normalisers ``[B, H, T]``, the slots' levels ``[B, H, G]``, log-mass, centroid and
    mean key.
    """
    query, key, value = call.query, call.key, call.value
    batch, heads, tokens, _ = query.shape
    groups, keys = call.indices.shape[2:]
    out = output_like(query, value.shape[3])
    lse = torch.empty((batch, heads, tokens), device=query.device)
    levels = torch.empty((batch, heads, groups), device=query.device)
    summary = summarise(call)
    if out.numel() == 0:
        return out, lse, levels, *summary
    sizes = _sizes(call)
    with on_device(query.device):
        launch(
            keys_read.keys_read_kernel, (groups * batch * heads,),
            query, key, value, out, lse, levels, *summary, call.indices, *call.side_tensors,
            flat_scale(call.alpha, batch, query), call.flat_beta,
            flat_scale(call.offset, batch, query), call.alpha_number, call.beta_number,
            call.offset_number, call.scale, tokens, heads, groups, keys, *query.stride(),
            *key.stride(), *value.stride(), *out.stride(), **sizes,
            num_warps=_warps("read", sizes),
        )  # fmt: skip
    return out, lse, levels, *summary


def attend_backward(
    call: KeysCall,
    gradient: Tensor,
    out: Tensor,
    lse: Tensor,
    levels: Tensor,
    log_mass: Tensor,
    centroid: Tensor,
    centre: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value, and of α, β and the offset where they are tensors.

    The last three are ``[B, H, 1, 1]``; that of β has one entry per summary head.
    """
    query, key, value = call.query, call.key, call.value
    batch, heads, tokens, width = query.shape
    key_heads, slots, device = key.shape[1], log_mass.shape[1], query.device
    dq, dk, dv = (torch.empty_like(side) for side in (query, key, value))
    if query.numel() == 0:
        zero = torch.zeros((batch, heads, 1, 1), device=device)
        return dq, dk, dv, zero, zero[:, :slots], zero
    groups, keys = call.indices.shape[2:]
    sizes, sides, blocks = _sizes(call), call.side_tensors, call.blocks
    delta = torch.empty_like(lse)
    summary = (log_mass, centroid, centre)
    *parts, dalpha = _slot_gradients(call, gradient, out, dq, lse, levels, delta, summary)
    with on_device(device):
        dc, dl, shift, dcentre = gather(call, (parts[0], parts[1], parts[2]), centroid)
    del parts
    dbeta = torch.empty((batch * slots, blocks), device=device)
    share = heads // key_heads
    each = _heads_at_once(call)
    leads = [
        slice(first * share, min(first + each, batch * key_heads) * share)
        for first in range(0, batch * key_heads, each)
    ]
    # Before the pairs take their memory, because sorting needs some of its own.
    with on_device(device):
        sorted_pairs = [_sort_pairs(call, lead) for lead in leads]
    pairs = each * share * groups * keys
    pair_dk = torch.empty((pairs, width), dtype=query.dtype, device=device)
    pair_dv = torch.empty((pairs, value.shape[3]), dtype=query.dtype, device=device)
    own = ("SR", "HAS_ALPHA", "HAS_BETA", "HAS_OFFSET")
    far = {name: size for name, size in sizes.items() if name not in own}
    near = {name: size for name, size in far.items() if name not in ("BM", "BK", "GROUP")}
    for lead, (order, starts) in zip(leads, sorted_pairs, strict=True):
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
                lse, delta, log_mass, dc, shift, dcentre, *sides[:2], call.flat_beta, dbeta,
                pair_dk, pair_dv, order, call.indices, starts, call.beta_number, call.scale, first,
                tokens, heads, key_heads, groups, keys, blocks, *query.stride(), *key.stride(),
                *value.stride(), *gradient.stride(), *dk.stride(), *dv.stride(), **near,
                SR=sizes["SR"], BP=_rows_at_once(call), HAS_BETA=call.beta is not None,
                STAGES=STAGES["key"], num_warps=_warps("key", sizes),
            )  # fmt: skip
    shape = (batch, heads, 1, 1)
    of_alpha = of_beta = of_offset = None
    if call.alpha is not None:
        of_alpha = dalpha.sum(-1).view(shape)
    if call.offset is not None:
        # Every logit of a slot has the offset in it.
        of_offset = dl.sum(-1).view(shape)
    if call.beta is not None:
        # β also stands before μ in the logits of the slots.
        through = dl.view(batch, slots, -1, width).sum(2) * centre
        of_beta = (dbeta.sum(-1).view(batch, slots) - through.sum(-1)).view(batch, slots, 1, 1)
    return dq, dk, dv, of_alpha, of_beta, of_offset


def _slot_gradients(
    call: KeysCall,
    gradient: Tensor,
    out: Tensor,
    dq: Tensor,
    lse: Tensor,
    levels: Tensor,
    delta: Tensor,
    summary: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write δ and the slots' share of dq; dC, shift, the rows' share of dμ, and dα, in parts.

    Parts are ``[B·H, splits, …]``: every program has one.
    """
    query = call.query
    batch, heads, tokens, width = query.shape
    groups = call.indices.shape[2]
    device, sizes = query.device, _sizes(call)
    rows = SLOT_ROWS
    # With a mask the first block may begin before the first token.
    tiles = cdiv(tokens if call.mask is None else call.blocks * call.block_size, rows)
    splits = min(tiles, max(1, SLOT_PROGRAMS * multiprocessors(device) // (batch * heads)))
    stretch = cdiv(tiles, splits)
    splits = cdiv(tiles, stretch)
    parts = (batch * heads, splits)
    dc = torch.empty((*parts, width, call.value.shape[3]), device=device)
    shift, dm = torch.empty((2, *parts, width), device=device)
    dalpha = torch.empty(parts, device=device)
    with on_device(device):
        launch(
            keys_grad.keys_slot_kernel, (batch * heads * splits,), query, out, gradient, dq, lse,
            levels, delta, *summary, *call.side_tensors[:2],
            flat_scale(call.alpha, batch, query), call.flat_beta, dc, shift, dm, dalpha,
            call.alpha_number, call.beta_number, call.scale, tokens, heads, groups, splits,
            stretch * rows, *query.stride(), *out.stride(), *gradient.stride(), *dq.stride(),
            **{name: sizes[name] for name in _OF_SLOTS}, BM=rows,
            EVEN=call.mask is None and tokens % rows == 0, STAGES=STAGES["slot"],
            num_warps=_warps("slot", sizes),
        )  # fmt: skip
    return dc, shift, dm, dalpha


def _sort_pairs(call: KeysCall, lead: slice) -> tuple[Tensor, Tensor]:
    """The pairs (group, chosen key) of some query heads, sorted by head and block of the key.

    Returns:
        Which pair comes at every place, and where the pairs of every block of every head begin.
    """
    heads, device = call.query.shape[1], call.query.device
    pairs, count = call.indices.shape[2] * call.indices.shape[3], lead.stop - lead.start
    # Missing keys sort behind all others.
    last = count * call.blocks
    dtype = torch.int16 if last < 2**15 - 1 else torch.int32
    found = torch.empty(count * pairs, dtype=dtype, device=device)
    if pairs:
        launch(
            keys_grad.pair_blocks_kernel, (cdiv(pairs, PAIRS_AT_ONCE), count), call.indices,
            call.side_tensors[1], found, lead.start, heads, pairs, call.blocks, last,
            W=call.block_size, BP=PAIRS_AT_ONCE, HAS_MASK=call.mask is not None, num_warps=4,
        )  # fmt: skip
    ordered, order = found.sort(stable=True)
    starts = torch.arange(last + 1, device=device, dtype=dtype)
    return order, torch.searchsorted(ordered, starts, out_int32=True)


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
        "SR": call.query.shape[1] // call.summary_heads,
        "HAS_ALPHA": call.alpha is not None,
        "HAS_BETA": call.beta is not None,
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


# Warps of a program; more for wide heads.
WARPS = {"read": 4, "slot": 4, "far": 4, "key": 4}


def _warps(kind: str, sizes: dict[str, Any]) -> int:
    is_wide = max(sizes["BD"], sizes["BE"]) > 64 or sizes["BM"] > 64
    return 8 if is_wide else WARPS[kind]
