"""Bidirectional attention from tensors to kernels: allocate, choose sizes, write the recipe.

A recipe is a list of prepared launches (`recipes`), a summary the fixed-size state of
keys and values (`lln.eager.summary`), a stretch the consecutive tokens that one program handles.

Dimension legend: B samples (or packed sequences), H query heads, Hk key heads, SH summary heads,
T queries, S keys, D head width, E value width. R = H / SH query heads share a summary; KG = SH / Hk
summaries share a key head (when β differs within a group).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.kernels.blocks.launch_blocks import starts_of
from lln.kernels.launching.recipes import Recipe, over_tiles
from lln.kernels.launching.shapes import output_like
from lln.kernels.launching.sizes import Sizes
from lln.kernels.launching.stretches import cdiv
from lln.kernels.lln.triton_slot_major_joint import joint_slot_major_kernel
from lln.kernels.summaries import triton_backward as bwd
from lln.kernels.summaries import triton_forward as fwd
from lln.kernels.summaries.gradients import launch_gradients
from lln.kernels.summaries.launch_passes import (
    WHOLE_GRADIENT,
    WHOLE_SUMMARY,
    key_grad_step,
    query_grad_steps,
    summary_shares,
    summary_steps,
)
from lln.kernels.summaries.lln_call import (
    Gradients,
    LLNCall,
    constant_args,
    launch_call,
    runtime_args,
)


def attend_bidirectional(
    call: LLNCall, save: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output ``[B, H, T, E]``; if ``save``, log-mass ``[B, SH, D]``, centroid ``[B, SH, D, E]``."""
    query, value, slots = call.query, call.value, call.summary_heads
    given = out
    out = output_like(query, value.shape[3]) if out is None else out
    log_mass = centroid = None
    if save:
        saved = (call.samples, slots, query.shape[3])
        log_mass = torch.empty(saved, dtype=torch.float32, device=query.device)
        centroid = torch.empty((*saved, value.shape[3]), dtype=value.dtype, device=query.device)
    if out.numel() == 0 or value.shape[2] == 0:
        for made in (log_mass, centroid):
            if made is not None:
                made.zero_()
        return out.zero_(), log_mass, centroid
    runtime = runtime_args(call, out, slots)
    runtime["p_o"] = out
    runtime["p_log_mass"], runtime["p_centroid"] = (log_mass, centroid) if save else (query, query)
    launch_call("attend", call, runtime, slots, _write_attend, save, others=(given,))
    return out, log_mass, centroid


def _write_attend(call: LLNCall, runtime: dict[str, Any], chosen: Sizes, save: bool) -> Recipe:
    batch, slots = call.samples, call.summary_heads
    heads, tokens, width = call.query.shape[1:]
    values = constant_args(call, chosen, runtime, slots, max(chosen.width, chosen.value_width))
    blocks = call.block_size > 0
    reader = chosen.joint_read if blocks else chosen.read
    rows = chosen.block_rows if blocks else chosen.read.tokens
    values |= _of_tiles(call, chosen) | {"tile_tokens": rows, "PLAIN": chosen.is_slot_major}
    # Masked values and a mix per channel do not leave the registers for values ahead.
    values["AHEAD"] = False
    if blocks and chosen.ahead_read is not None and call.mask is None and values["MIX"] < 3:
        reader, values["AHEAD"] = chosen.ahead_read, True
    before, gaps = starts_of(call)
    if chosen.short:
        own = {"BK": chosen.summarise.tokens, "BQ": reader.tokens, "SAVE": save}
        step = over_tiles(fwd.short_fwd_kernel, (batch * slots,), values, reader, **own)
        return Recipe([*before, step], gaps)
    longest, longest_keys = call.longest or tokens, call.longest or call.key.shape[2]
    tile = chosen.summarise
    shares = summary_shares(chosen)
    stretch = tile.stretch(longest_keys, tile.tokens, batch * slots, chosen.cores, shares, True)
    splits = cdiv(longest_keys, stretch)
    own = values | {"SHIFTED": False, "program_tokens": stretch}
    steps, workspace = summary_steps(batch * slots, chosen, own, splits, chosen.folds)
    values |= {"parts": splits, "FOLDS": True} if chosen.folds else WHOLE_SUMMARY
    if not save:
        kept = (batch, slots, width)
        workspace["p_log_mass"] = kept, torch.float32
        workspace["p_centroid"] = (*kept, call.value.shape[3]), call.value.dtype
    longest = call.reach(longest)
    stretch = reader.stretch(longest, rows, batch * heads, chosen.cores)
    grid = (cdiv(longest, stretch), batch * heads)
    steps.append(over_tiles(fwd.read_kernel, grid, values, reader, program_tokens=stretch))
    return Recipe(before + steps, gaps | workspace)


def bidirectional_gradients(
    call: LLNCall,
    gradient: Tensor,
    log_mass: Tensor | None,
    centroid: Tensor | None,
    wanted: tuple[bool, bool, bool],
    dv_out: Tensor | None = None,
) -> Gradients:
    """Gradients of query, key, value, and of alpha, beta and mix where wanted."""
    batch, heads, slots = call.samples, call.query.shape[1], call.summary_heads

    def parts_of(mode: int) -> tuple[tuple[int, ...], ...]:
        cut = _cut(call, call.sizes(slots), mode)
        of_beta = (batch, slots, cut.key_programs, 3)
        return (batch, heads, cut.query_programs), of_beta, (batch, heads, cut.key_programs)

    return launch_gradients(
        "backward", call, gradient, slots, wanted, dv_out, parts_of, _write_backward,
        p_log_mass=log_mass, p_centroid=centroid,
    )  # fmt: skip


class _Cut(NamedTuple):
    """How the backward passes are split; this stays the same if sizes shrink later."""

    query_programs: int
    key_programs: int
    query_tokens: int
    key_tokens: int


def _is_split(chosen: Sizes, mode: int) -> bool:
    """Whether the diagonal's gradients have a separate pass; dmix needs both parts in one pass."""
    return chosen.split_blocks and not mode


def _is_joined(chosen: Sizes, mode: int) -> bool:
    """Whether the diagonal's gradients share a pass with those of the keys, after the queries'."""
    return chosen.is_slot_major and chosen.is_joined and _is_split(chosen, mode)


def _cut(call: LLNCall, chosen: Sizes, mode: int) -> _Cut:
    batch, heads, slots = call.samples, call.query.shape[1], call.summary_heads
    tokens, keys = call.longest or call.query.shape[2], call.longest or call.key.shape[2]
    split = _is_split(chosen, mode)
    is_joint = call.block_size > 0 and (not split or _is_joined(chosen, mode))
    walker = chosen.joint_grad if is_joint else chosen.key_grad
    rows = chosen.block_rows if is_joint else walker.tokens
    keys = call.reach(keys) if is_joint else keys
    tile = chosen.query_grad
    parts = not chosen.is_slot_major
    stretch = tile.stretch(tokens, tile.tokens, batch * heads, chosen.cores, parts=parts)
    # Where passes fold, every program first sums up the parts of the gradients.
    few = chosen.folds
    key_stretch = walker.stretch(keys, rows, batch * slots, chosen.cores, parts=few)
    if chosen.short and not split:
        return _Cut(1, 1, stretch, key_stretch)
    return _Cut(cdiv(tokens, stretch), cdiv(keys, key_stretch), stretch, key_stretch)


def _write_backward(call: LLNCall, runtime: dict[str, Any], chosen: Sizes, *asked: int) -> Recipe:
    batch, slots, heads = call.samples, call.summary_heads, call.query.shape[1]
    keys, value_width = call.value.shape[2:]
    alpha_grad, beta_grad, mode = asked
    splits, key_splits, stretch, key_stretch = _cut(call, call.sizes(slots), mode)
    split, joined = _is_split(chosen, mode), _is_joined(chosen, mode)
    walker = chosen.joint_grad if call.block_size and not split else chosen.key_grad
    values = constant_args(call, chosen, runtime, slots) | _of_tiles(call, chosen)
    values |= {"ALPHA_GRAD": alpha_grad, "BETA_GRAD": beta_grad, "MIX_GRAD": mode, "SPLIT": split}
    values["tile_tokens"] = chosen.block_rows
    before, gaps = starts_of(call)
    if chosen.short and not split:
        own = {"BK": chosen.key_grad.tokens, "BQ": chosen.query_grad.tokens}
        own["BJ"] = chosen.joint_grad.tokens
        step = over_tiles(bwd.short_bwd_kernel, (batch * slots,), values, walker, **own)
        return Recipe([*before, step], gaps)
    own = values | {"program_tokens": stretch}
    steps, workspace = query_grad_steps(batch * heads, chosen, own, splits, chosen.folds)
    folded = {"parts": heads // slots * splits, "FOLDS": True}
    values |= folded if chosen.folds else WHOLE_GRADIENT
    workspace["p_shift"] = (batch, slots, call.query.shape[3]), torch.float32
    workspace["p_dc"] = (batch, slots, value_width, call.query.shape[3]), call.value.dtype
    own = values | {"program_tokens": key_stretch}
    grid = (key_splits, batch * slots)
    if call.block_size and not split:
        steps.append(over_tiles(bwd.key_bwd_kernel, grid, own, walker))
    elif joined:
        steps.append(over_tiles(joint_slot_major_kernel, grid, own, chosen.joint_grad))
    else:
        own |= {"MIX": 0, "SPLIT": False, "SHIFTED": False}
        steps.append(key_grad_step(batch * slots, chosen, own, key_splits))
    if split and not joined:
        tile, longest = chosen.joint_grad, call.reach(call.longest or keys)
        stretch = tile.stretch(longest, chosen.block_rows, batch * slots, chosen.cores)
        grid = (cdiv(longest, stretch), batch * slots)
        steps.append(over_tiles(bwd.key_bwd_kernel, grid, values, tile, program_tokens=stretch))
    return Recipe(before + steps, gaps | workspace)


def _of_tiles(call: LLNCall, chosen: Sizes) -> dict[str, Any]:
    """Whether a tile is exactly one block, and whether all tiles of all passes are full."""
    block_tile = chosen.joint_read.tokens
    tiles = [chosen.summarise, chosen.read, chosen.query_grad, chosen.slot_grad, chosen.key_grad]
    even = call.mask is None and call.bounds is None
    if call.block_size:
        tiles += [chosen.joint_read, chosen.joint_grad]
        even = even and block_tile == chosen.block_rows
    largest = max(tile.tokens for tile in tiles)
    even = even and call.query.shape[2] % largest == 0 and call.key.shape[2] % largest == 0
    return {"ONE_BLOCK": block_tile == call.block_size, "EVEN": even}
