"""Attention with exact keys from tensors to kernels: allocate, choose sizes, launch.

Dimension legend: B batch, H query heads, Hk key heads, SH summary heads, T tokens, D head width,
E value width, W tokens in a block, n blocks, G groups per head, K keys per group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lln.kernels.keys import launch_lists
from lln.kernels.keys import triton_keys_grad as keys_grad
from lln.kernels.keys import triton_keys_read as keys_read
from lln.kernels.keys.keys_call import KeysCall
from lln.kernels.keys.keys_sizes import STAGES, registers, rows_at_once, sizes_of, slot_tile, warps
from lln.kernels.keys.launch_choice import launch
from lln.kernels.keys.launch_slots import gather, summarise
from lln.kernels.launching.kernel_arguments import flat_scale
from lln.kernels.launching.limits import multiprocessors
from lln.kernels.launching.recipes import on_device
from lln.kernels.launching.shapes import output_like
from lln.kernels.launching.stretches import cdiv

# Pairs whose blocks a program finds.
PAIRS_AT_ONCE = 1024
# Programs of the slots' gradients per multiprocessor.
SLOT_PROGRAMS = 8
# Programs of the lists' gradients per multiprocessor, at least.
LIST_PROGRAMS = 4
_OF_SLOTS = ("D", "E", "BD", "BE", "GROUP", "SR", "HAS_ALPHA", "HAS_BETA", "HAS_MASK", "PRECISION")
_OF_BLOCKS = ("W", "D", "E", "BD", "BE", "BW", "R", "HAS_MASK", "EVEN", "PRECISION")
# The pairs' gradients may take this share of the memory of query, key, value and their gradients.
PAIR_SHARE = 0.17


def attend_exact_keys(call: KeysCall) -> tuple[Tensor, ...]:
    """Output ``[B, H, T, E]``, and what the backward needs.

    That is: log-normalisers ``[B, H, T]``, the slots' levels ``[B, H, G]``, log-mass, centroid and
    mean key.
    """
    summary = summarise(call)
    return *read_keys(call, summary), *summary


def read_keys(
    call: KeysCall, summary: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-normalisers and the slots' levels, from log-mass, centroid and mean key."""
    query, key, value = call.query, call.key, call.value
    batch, heads, tokens, _ = query.shape
    groups = call.groups
    out = output_like(query, value.shape[3])
    lse = torch.empty((batch, heads, tokens), device=query.device)
    levels = torch.empty((batch, heads, groups), device=query.device)
    if out.numel() == 0:
        return out, lse, levels
    if call.features is not None:
        launch_lists.read(call, out, lse, levels, summary)
        return out, lse, levels
    sizes, keys = sizes_of(call), call.indices.shape[3]
    with on_device(query.device):
        launch(
            keys_read.keys_read_kernel, (groups * batch * heads,),
            query, key, value, out, lse, levels, *summary, call.indices, *call.masking,
            flat_scale(call.alpha, batch, query), call.flat_beta,
            flat_scale(call.offset, batch, query), call.alpha_number, call.beta_number,
            call.offset_number, call.scale, call.held, tokens, heads, groups, keys,
            *query.stride(), *key.stride(), *value.stride(), *out.stride(), **sizes,
            STAGES=STAGES["chosen"], num_warps=warps("read", sizes),
        )  # fmt: skip
    return out, lse, levels


def exact_keys_gradients(
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
    sizes, masking, blocks = sizes_of(call), call.masking, call.blocks
    delta = torch.empty_like(lse)
    summary = (log_mass, centroid, centre)
    parts, scalars = slot_gradients(call, gradient, out, dq, lse, levels, delta, summary)
    dc, dl, shift, dcentre = gather(call, parts, centroid)
    del parts
    dbeta = torch.empty((batch * slots, blocks), device=device)
    listed = call if call.features is not None else None
    if listed is not None:
        call = call._replace(indices=launch_lists.lists_of_runs(call))
    groups, keys = call.indices.shape[2:]
    # Before the pairs take their memory, because sorting needs some of its own.
    with on_device(device):
        order, starts = _sort_pairs(call)
    share, each = heads // key_heads, heads_at_once(call)
    pairs = each * share * groups * keys
    pair_dk = torch.empty((pairs, width), dtype=query.dtype, device=device)
    pair_dv = torch.empty((pairs, value.shape[3]), dtype=query.dtype, device=device)
    pairs_of = (pair_dk, pair_dv)
    near = {name: sizes[name] for name in _OF_BLOCKS}
    for first in range(0, batch * key_heads, each):
        count = min(each, batch * key_heads - first)
        with on_device(device):
            if listed is not None:
                some = (masking[:2], first * share, count * share, groups)
                launch_lists.gradients(listed, gradient, dq, lse, delta, pairs_of, *some)
            else:
                some = (masking[:2], first * share, count * share)
                far_gradients(call, gradient, dq, lse, delta, pairs_of, *some)
            launch(
                keys_grad.keys_key_kernel, (blocks * count,), query, key, value, gradient, dk, dv,
                lse, delta, log_mass, dc, shift, dcentre, *masking[:2], call.flat_beta, dbeta,
                *pairs_of, order, call.indices, starts, call.beta_number, call.scale, first,
                tokens, heads, key_heads, groups, keys, blocks, *query.stride(), *key.stride(),
                *value.stride(), *gradient.stride(), *dk.stride(), *dv.stride(), **near,
                SR=sizes["SR"], BP=rows_at_once(call), HAS_BETA=call.beta is not None,
                STAGES=STAGES["key"], num_warps=warps("key", sizes), **registers(sizes),
            )  # fmt: skip
    shape = (batch, heads, 1, 1)
    of_alpha = of_beta = of_offset = None
    if call.alpha is not None:
        of_alpha = scalars[0].sum(-1).view(shape)
    if call.offset is not None:
        of_offset = scalars[1].sum(-1).view(shape)
    if call.beta is not None:
        # β also stands before μ in the logits of the slots.
        through = dl.view(batch, slots, -1, width).sum(2) * centre
        of_beta = (dbeta.sum(-1).view(batch, slots) - through.sum(-1)).view(batch, slots, 1, 1)
    return dq, dk, dv, of_alpha, of_beta, of_offset


def slot_gradients(
    call: KeysCall,
    gradient: Tensor,
    out: Tensor,
    dq: Tensor,
    lse: Tensor,
    levels: Tensor,
    delta: Tensor,
    summary: tuple[Tensor, Tensor, Tensor],
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Write δ and the slots' share of dq; dC, dL and the rows' share of dμ; dα and doffset.

    The latter are in parts ``[B·H, splits, …]``, one of every program; dα and doffset in one tensor
    ``[2, B·H, splits]``.
    """
    query = call.query
    batch, heads, tokens, width = query.shape
    groups = call.groups
    device, sizes = query.device, sizes_of(call)
    rows, stages = slot_tile(call)
    # With a mask the first block may begin before the first token.
    tiles = cdiv(tokens if call.mask is None else call.blocks * call.block_size, rows)
    splits = min(tiles, max(1, SLOT_PROGRAMS * multiprocessors(device) // (batch * heads)))
    stretch = cdiv(tiles, splits)
    splits = cdiv(tiles, stretch)
    parts = (batch * heads, splits)
    dc = torch.empty((*parts, width, call.value.shape[3]), device=device)
    dl, dm = torch.empty((2, *parts, width), device=device)
    scalars = torch.empty((2, *parts), device=device)
    with on_device(device):
        launch(
            keys_grad.keys_slot_kernel, (batch * heads * splits,), query, out, gradient, dq, lse,
            levels, delta, *summary, *call.masking[:2],
            flat_scale(call.alpha, batch, query), call.flat_beta, dc, dl, dm, *scalars,
            call.alpha_number, call.beta_number, call.scale, tokens, heads, groups, splits,
            stretch * rows, *query.stride(), *out.stride(), *gradient.stride(), *dq.stride(),
            **{name: sizes[name] for name in _OF_SLOTS}, BM=rows,
            EVEN=call.mask is None and tokens % rows == 0, STAGES=stages,
            num_warps=warps("slot", sizes),
        )  # fmt: skip
    return (dc, dl, dm), scalars


def far_gradients(
    call: KeysCall,
    gradient: Tensor,
    dq: Tensor,
    lse: Tensor,
    delta: Tensor,
    pairs: tuple[Tensor, Tensor],
    masking: tuple[Tensor, Tensor],
    first: int,
    count: int,
) -> None:
    """Add block and chosen keys to dq of ``count`` query heads from ``first`` on.

    Args:
        call: The call.
        gradient: Of the output.
        dq: The slots' share.
        lse: Log-normalisers.
        delta: Row sums of gradient times output.
        pairs: Where dk and dv of every (group, chosen key) of these heads go.
        masking: The mask as bytes, and where the first blocks begin.
        first: First of the heads.
        count: How many.
    """
    query, key, value = call.query, call.key, call.value
    (heads, tokens), (groups, keys) = query.shape[1:3], call.indices.shape[2:]
    sizes = sizes_of(call)
    launch(
        keys_grad.keys_far_kernel, (count * groups,), query, key, value, gradient, dq, lse, delta,
        call.indices, *masking, *pairs, call.scale, first, tokens, heads, groups, keys,
        *query.stride(), *key.stride(), *value.stride(), *gradient.stride(), *dq.stride(),
        **{name: sizes[name] for name in _OF_BLOCKS}, BM=sizes["BM"], BK=sizes["BK"],
        GROUP=sizes["GROUP"], MORE=sizes["MORE"], STAGES=STAGES["chosen"],
        num_warps=warps("far", sizes),
    )  # fmt: skip


def _sort_pairs(call: KeysCall) -> tuple[Tensor, Tensor]:
    """The pairs (group, chosen key) of all query heads, sorted by head and block of the key.

    Returns:
        See `in_order`.
    """
    batch, heads, groups, keys = call.indices.shape
    device, pairs = call.query.device, groups * keys
    # Missing keys sort behind all others.
    last = batch * heads * call.blocks
    found = torch.empty(batch * heads * pairs, dtype=short_dtype(last), device=device)
    if pairs:
        launch(
            keys_grad.pair_blocks_kernel, (cdiv(pairs, PAIRS_AT_ONCE), batch * heads),
            call.indices, call.masking[1], found, heads, pairs, call.blocks, last,
            W=call.block_size, BP=PAIRS_AT_ONCE, HAS_MASK=call.mask is not None, num_warps=4,
        )  # fmt: skip
    return in_order(found, last)


def in_order(blocks: Tensor, last: int) -> tuple[Tensor, Tensor]:
    """Which pair comes at every place, and where the pairs of every block of every head begin.

    Args:
        blocks: The block of every pair's key, counted over all heads.
        last: How many blocks there are; also that of pairs without a key.
    """
    ordered, order = blocks.sort(stable=True)
    starts = torch.arange(last + 1, device=blocks.device, dtype=blocks.dtype)
    return order, torch.searchsorted(ordered, starts, out_int32=True)


def short_dtype(last: int) -> torch.dtype:
    """An integer dtype for numbers up to ``last``; short ones are sorted sooner."""
    return torch.int16 if last < 2**15 - 1 else torch.int32


def heads_at_once(call: KeysCall) -> int:
    """How many key heads the backward takes at once, to bound the memory of the pairs."""
    query, key = call.query, call.key
    width = query.shape[3] + call.value.shape[3]
    share = query.shape[1] // key.shape[1]
    numbers, least = share * call.indices.shape[2] * call.indices.shape[3] * width, 1
    if call.features is not None:
        numbers += share * launch_lists.numbers_per_head(call)
        # A head has few runs: of a small batch too few programs would run at a time.
        programs = LIST_PROGRAMS * multiprocessors(query.device)
        least = cdiv(programs, share * call.indices.shape[2])
    one = max(numbers * query.itemsize, 1)
    tensors = 2 * (query.nbytes + key.nbytes + call.value.nbytes)
    return min(max(least, int(tensors * PAIR_SHARE) // one), query.shape[0] * key.shape[1])
