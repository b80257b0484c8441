"""Attention to a window, sinks and chosen pages, from tensors to kernels.

Dimension legend: see `lln.kernels.pages.triton_page_choice`; parts, slots, entries and segments:
`lln.kernels.pages.triton_page_lists`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lln.kernels.blocks import launch_window
from lln.kernels.launching.kernel_arguments import precision_of
from lln.kernels.launching.limits import power_of_two
from lln.kernels.launching.recipes import (
    Recipe,
    Step,
    Workspace,
    launch_fixed,
    launch_heads,
    over_tiles,
)
from lln.kernels.launching.shapes import layout_of, output_like
from lln.kernels.launching.sizes import Sizes
from lln.kernels.launching.stretches import Tile, cdiv
from lln.kernels.launching.triton_steps import NEVER
from lln.kernels.pages import triton_page_few as page_few
from lln.kernels.pages import triton_page_grad as page_grad
from lln.kernels.pages import triton_page_lists as page_lists
from lln.kernels.pages import triton_page_read as page_read
from lln.kernels.pages.launch_page_choice import QUERIES, Near

# What all pages of some queries write takes about this many bytes at a time, and so do bits.
MOST_BYTES, MOST_BITS = 2**30, 2**28
# Entries of a segment; queries in a tile that joins their pages.
SEGMENT, JOINED = 512, 32
# So many queries behind a longer text go query by query: keys in a tile of theirs, and the programs
# that a multiprocessor gets at least.
FEW, FEW_KEYS, FEW_PROGRAMS = 16, 64, 2


class PagesCall(NamedTuple):
    """One call.

    Attributes:
        chosen: int32 ``[B, HK, T, P]``, contiguous, no page twice; -1 = none.
        near: What a query sees besides.
        scale: Factor of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    chosen: Tensor
    near: Near
    scale: float

    @property
    def is_few(self) -> bool:
        """Whether lists are made only for gradients."""
        return self.query.shape[2] <= FEW and self.query.shape[2] < self.key.shape[2]

    @property
    def parts(self) -> tuple[int, int]:
        """How many queries a part has, and parts a line has."""
        (_, heads, tokens, width), key_heads = self.query.shape, self.key.shape[1]
        row = max(self.slots, 1) * heads // key_heads * max(width, self.value.shape[3])
        most = max(1, MOST_BYTES // (row * self.query.itemsize))
        chunk = max(1, (tokens + QUERIES - 1 if most >= tokens else most) // QUERIES)
        return chunk * QUERIES, cdiv(tokens, chunk * QUERIES)

    @property
    def sink_pages(self) -> int:
        """Pages that every query has."""
        return cdiv(self.near.sinks, self.near.page)

    @property
    def pages(self) -> int:
        """V: those, and all pages."""
        return self.sink_pages + cdiv(self.key.shape[2], self.near.page)

    @property
    def slots(self) -> int:
        """Slots of a query."""
        return self.sink_pages + self.chosen.shape[3]

    @property
    def lines(self) -> int:
        """Samples times key heads."""
        return self.query.shape[0] * self.key.shape[1]

    @property
    def segments(self) -> int:
        """Most segments of a part."""
        return self.parts[0] * self.slots // SEGMENT + self.pages

    def numbers(self) -> dict[str, Any]:
        """What the kernels are told."""
        chunk, parts = self.parts
        return {
            **self.near.numbers(self.query, self.key),
            "chunk": chunk,
            "parts": parts,
            "slots": self.slots,
            "sink_pages": self.sink_pages,
            "V": self.pages,
            "P": self.chosen.shape[3],
            "most": self.segments,
            "C": SEGMENT,
        }


class PageLists(NamedTuple):
    """The queries of every page, see `lln.kernels.pages.triton_page_lists`; int32.

    Attributes:
        order: ``[lines · parts, chunk · slots]``, entries by page.
        counts: ``[lines · parts, V]``, how many a page has.
        ends: Likewise, where they end in the order.
        segment_ends: Likewise, where a page's segments end in the table.
        table: ``[lines · parts, segments, 2]``, page and first entry of a segment; -1 = none.
    """

    order: Tensor
    counts: Tensor
    ends: Tensor
    segment_ends: Tensor
    table: Tensor


def list_shapes(call: PagesCall, always: bool = False) -> tuple[tuple[int, ...], ...]:
    """The shapes of `PageLists`; of few queries only ``always``."""
    if call.is_few and not always:
        return ((0,),) * 5
    chunk, parts = call.parts
    rows = call.lines * parts
    counts = (rows, call.pages)
    return (rows, chunk * call.slots), counts, counts, counts, (rows, call.segments, 2)


def list_pages(call: PagesCall) -> PageLists:
    """Sort the queries by page."""
    device, (chunk, parts) = call.query.device, call.parts
    # Zeros, because not all is written, and results must repeat.
    shapes = list_shapes(call, True)
    lists = PageLists(*[torch.zeros(n, dtype=torch.int32, device=device) for n in shapes])
    order, counts, ends, segment_ends, table = lists
    if order.numel() == 0 or call.pages == 0:
        return lists
    table.fill_(-1)
    words, rows = chunk // 32, call.lines * parts
    values = {**call.numbers(), "words": words, "BP": power_of_two(call.slots)}
    together = max(1, MOST_BITS // (4 * words * call.pages))
    for first in range(0, rows, together):
        here = slice(first, min(first + together, rows))
        count = here.stop - first
        shape = (count, call.pages, words)
        bits = torch.zeros(shape, dtype=torch.int32, device=device)
        runtime: dict[str, Any] = {"p_chosen": call.chosen, "p_bits": bits}
        runtime["p_counts"] = counts[here]
        kind = (first, count, tuple(values.items()))
        own = values | {"first_part": first}
        launch_fixed(("mark pages", *kind), runtime, device, partial(_mark, call, own, count))
        torch.cumsum(counts[here], 1, dtype=torch.int32, out=ends[here])
        several = (counts[here] + (SEGMENT - 1)) // SEGMENT
        torch.cumsum(several, 1, dtype=torch.int32, out=segment_ends[here])
        runtime |= {"p_ends": ends[here], "p_segment_ends": segment_ends[here]}
        runtime |= {"p_order": order[here], "p_table": table[here]}
        launch_fixed(("list pages", *kind), runtime, device, partial(_list, call, own, count))
    return lists


def _mark(call: PagesCall, values: dict[str, Any], count: int) -> Recipe:
    tiles, wide = cdiv(values["chunk"], 64), min(256, max(16, power_of_two(values["words"])))
    mark = Step(page_lists.mark_kernel, (tiles * count,), values | {"tiles": tiles, "BQ": 64}, 4)
    grid = (cdiv(call.pages, 8) * count,)
    own = values | {"BV": 8, "BW": wide}
    return Recipe([mark, Step(page_lists.count_kernel, grid, own, 4)], {})


def _list(call: PagesCall, values: dict[str, Any], count: int) -> Recipe:
    wide = min(256, max(32, power_of_two(values["words"])))
    own = values | {"BW": wide, "BE": 64}
    return Recipe([Step(page_lists.list_kernel, (call.pages * count,), own, 2)], {})


def attend_pages(call: PagesCall) -> tuple[Tensor, ...]:
    """Output ``[B, H, T, E]``, log₂ of every row's normaliser ``[B, H, T]``, and `PageLists`.

    Of few queries lists are empty.
    """
    if call.is_few:
        device = call.query.device
        out = output_like(call.query, call.value.shape[3])
        norm = torch.empty(call.query.shape[:3], dtype=torch.float32, device=device)
        shapes = list_shapes(call)
        lists = PageLists(*[torch.empty(n, dtype=torch.int32, device=device) for n in shapes])
    else:
        window, front = _window_call(call)
        out, norm = launch_window.attend_window(window)
        lists = list_pages(call)
        if front:
            # Copies, because results must lie in memory as the operator says.
            own = output_like(call.query, call.value.shape[3])
            out, norm = own.copy_(out[:, :, front:]), norm[:, :, front:].contiguous()
    if out.numel() > 0 and (call.is_few or call.slots > 0):
        sides = {"p_q": call.query, "p_k": call.key, "p_v": call.value, "p_o": out}
        rows = {"p_norm": norm, "p_chosen": call.chosen}
        name, steps = ("read few", _few_steps) if call.is_few else ("read pages", _read_steps)
        _launch(name, call, sides, rows, lists, steps)
    return out, norm, *lists


def page_gradients(
    call: PagesCall, out: Tensor, norm: Tensor, lists: PageLists, gradient: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value."""
    if call.is_few:
        lists = list_pages(call)
    window, front = _window_call(call)
    level = torch.empty_like(norm)
    before = call.key.shape[2] - window.key.shape[2]
    if before or front:
        # Rows in front have no gradient, and weights of zero.
        wide = [pad(side, (0, 0, front, 0)) for side in (out, gradient)]
        norm_wide = pad(norm, (front, 0), value=-NEVER.value)
        level_wide = torch.empty_like(norm_wide)
        near = launch_window.window_gradients(window, wide[0], norm_wide, wide[1], level=level_wide)
        level = level_wide[:, :, front:].contiguous()
        dq = torch.empty_like(call.query).copy_(near[0][:, :, front:])
        dk, dv = torch.zeros_like(call.key), torch.zeros_like(call.value)
        dk[:, :, before:], dv[:, :, before:] = near[1], near[2]
    else:
        dq, dk, dv = launch_window.window_gradients(window, out, norm, gradient, level=level)
    if out.numel() == 0 or call.slots == 0:
        return dq, dk, dv
    sides = {"p_q": call.query, "p_k": call.key, "p_v": call.value, "p_g": gradient}
    sides |= {"p_dq": dq, "p_dk": dk, "p_dv": dv}
    rows = {"p_norm": norm, "p_level": level, "p_chosen": call.chosen}
    _launch("read pages backward", call, sides, rows, lists, _grad_steps)
    return dq, dk, dv


def _window_call(call: PagesCall) -> tuple[launch_window.WindowCall, int]:
    """The part that is near, and how many rows of zeros come before queries that continue."""
    query, key, value, _, near, scale = call
    mask, front = near.mask, min(near.window, key.shape[2] - query.shape[2])
    if key.shape[2] > query.shape[2]:
        begin = key.shape[2] - query.shape[2] - front
        query, key, value = pad(query, (0, 0, front, 0)), key[:, :, begin:], value[:, :, begin:]
        mask = None if mask is None else mask[:, begin:]
    rest = (near.window, False, scale, near.causal)
    return launch_window.WindowCall(query, key, value, mask, None, *rest), front


def _launch(
    name: str,
    call: PagesCall,
    sides: dict[str, Tensor],
    rows: dict[str, Tensor],
    lists: PageLists,
    steps_of: Any,
) -> None:
    """Run the launches of a pass, as many parts at a time as fit into memory."""
    near = call.near
    own = {**call.numbers(), "scale": call.scale, "BK": max(16, power_of_two(near.page))}
    options = (layout_of(near.mask), layout_of(call.chosen), near[1:], call.scale)
    runtime = {**rows, **near.tensors(call.query), "p_order": lists.order}
    runtime |= {"p_counts": lists.counts, "p_ends": lists.ends, "p_table": lists.table}
    runtime["p_segment_ends"] = lists.segment_ends
    launch_heads(
        name, sides, runtime, options, (near.page,),
        lambda chosen, values: steps_of(call, values | own, chosen),
    )  # fmt: skip


def _together(call: PagesCall, part_bytes: int) -> list[tuple[int, int]]:
    """First part and how many, for every round of launches."""
    parts = call.parts[1]
    many = max(1, MOST_BYTES // part_bytes) if parts == 1 else 1
    total = call.lines * parts
    return [(first, min(many, total - first)) for first in range(0, total, many)]


def _rows_of(tile: Tile, values: dict[str, Any]) -> Tile:
    return tile._replace(tokens=max(tile.tokens, power_of_two(values["R"])))


def _read_steps(call: PagesCall, values: dict[str, Any], chosen: Sizes) -> Recipe:
    entries = call.parts[0] * call.slots * values["R"]
    rounds = _together(call, entries * values["E"] * call.query.itemsize)
    tile, tiles = _rows_of(chosen.page_read, values), cdiv(call.parts[0], JOINED)
    steps = []
    for first, count in rounds:
        own = values | {"first_part": first, "HAS_NEAR": True}
        grid = (call.segments * count,)
        steps.append(over_tiles(page_read.page_read_kernel, grid, own, tile))
        steps.append(_join(page_read.page_join_kernel, own, tiles, count))
    workspace: Workspace = {
        "p_part": ((rounds[0][1], entries, values["E"]), call.query.dtype),
        "p_part_norm": ((rounds[0][1], entries), torch.float32),
    }
    return Recipe(steps, workspace)


def _few_steps(call: PagesCall, values: dict[str, Any], chosen: Sizes) -> Recipe:
    near, tokens, members = call.near, call.query.shape[2], values["R"]
    keys = near.window * (1 if near.causal else 2) + 1 + near.sinks + values["P"] * near.page
    wanted = cdiv(FEW_PROGRAMS * chosen.cores, call.lines * tokens)
    across = FEW_KEYS if chosen.width <= 128 else FEW_KEYS // 2
    share = cdiv(cdiv(keys, across), wanted) * across
    slots = cdiv(keys, share)
    own = values | {"chunk": tokens, "parts": 1, "first_part": 0, "slots": slots}
    # All slots are as sinks: every query has them.
    own |= {"sink_pages": slots, "V": slots + 1, "keys": keys, "share": share, "HAS_NEAR": False}
    tile = Tile(max(16, power_of_two(members)), 4, chosen.page_read.stages)
    grid = (slots * tokens * call.lines,)
    steps = [over_tiles(page_few.page_few_kernel, grid, own, tile, BS=across)]
    steps.append(_join(page_read.page_join_kernel, own, 1, call.lines, 16))
    entries = tokens * slots * members
    workspace: Workspace = {
        "p_part": ((call.lines, entries, values["E"]), torch.float32),
        "p_part_norm": ((call.lines, entries), torch.float32),
    }
    return Recipe(steps, workspace)


def _grad_steps(call: PagesCall, values: dict[str, Any], chosen: Sizes) -> Recipe:
    entries = call.parts[0] * call.slots * values["R"]
    sums = call.segments * call.near.page
    shares = entries * values["D"] * call.query.itemsize
    rounds = _together(call, shares + 4 * sums * (values["D"] + values["E"]))
    tile, tiles = _rows_of(chosen.page_grad, values), cdiv(call.parts[0], JOINED)
    values |= {"PRECISION": precision_of(call.query)}
    pages = call.pages - call.sink_pages
    steps = []
    for first, count in rounds:
        own = values | {"first_part": first, "pages": pages}
        grid = (call.segments * count,)
        steps.append(over_tiles(page_grad.page_grad_kernel, grid, own, tile))
        steps.append(_join(page_grad.page_query_kernel, own, tiles, count))
        steps.append(Step(page_grad.page_key_kernel, (pages * count,), own, 4))
    workspace: Workspace = {
        "p_dq_part": ((rounds[0][1], entries, values["D"]), call.query.dtype),
        "p_dk_part": ((rounds[0][1], sums, values["D"]), torch.float32),
        "p_dv_part": ((rounds[0][1], sums, values["E"]), torch.float32),
    }
    return Recipe(steps, workspace)


def _join(kernel: Any, values: dict[str, Any], tiles: int, count: int, rows: int = JOINED) -> Step:
    own = {"tiles": tiles, "BT": rows, "STAGES": 3}
    return Step(kernel, (tiles * values["R"] * count,), values | own, 4)
