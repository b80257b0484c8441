"""The choice of pages from tensors to kernels: allocate, cut into chunks of queries, launch.

Dimension legend: see `lln.kernels.pages.triton_page_choice`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.eager.diagonal import first_tokens
from lln.kernels.launching.kernel_arguments import mask_bytes
from lln.kernels.launching.limits import power_of_two
from lln.kernels.launching.recipes import (
    Place,
    Recipe,
    Step,
    Workspace,
    launch_heads,
    over_tiles,
)
from lln.kernels.launching.shapes import layout_of
from lln.kernels.launching.sizes import Sizes
from lln.kernels.launching.stretches import Tile, cdiv
from lln.kernels.pages import triton_page_choice as kernels

# Scores are written for as many queries at a time as take this many bytes.
MOST_BYTES = 256 * 2**20
# Queries of a chunk are a multiple of this: kernels then get numbers of one kind.
QUERIES = 128
# Scores of a row that one program of ``pick`` holds, and a warp of it.
SEGMENT, OF_WARP = 8192, 2048
# Tokens of a page that are scored at once; most pages of a program; pages of a group, and from how
# many times P pages on there are groups.
TOKENS, STRIP, GROUP, GROUPED = 16, 128, 16, 32


class Near(NamedTuple):
    """What every query sees besides its pages, and how tokens lie in pages.

    Attributes:
        mask: bool ``[B, S]`` or None.
        window: Tokens on a side.
        sinks: First valid tokens that all queries see, at most S.
        page: Tokens of a page.
        causal: Whether a query sees only its own and earlier tokens.
    """

    mask: Tensor | None
    window: int
    sinks: int
    page: int
    causal: bool

    def tensors(self, stand_in: Tensor) -> dict[str, Tensor]:
        """The mask as bytes and the first valid tokens; ``stand_in`` where there are none."""
        first = stand_in if self.mask is None else first_tokens(self.mask).to(torch.int32)
        return {"p_mask": mask_bytes(self.mask, stand_in), "p_first": first}

    def numbers(self, query: Tensor, key: Tensor) -> dict[str, Any]:
        """What most kernels are told: these numbers, and those of heads and tokens."""
        return {
            "window": self.window,
            "sinks": self.sinks,
            "page": self.page,
            "CAUSAL": self.causal,
            "HAS_MASK": self.mask is not None,
            "T": query.shape[2],
            "S": key.shape[2],
            "ahead": key.shape[2] - query.shape[2],
        }


def choose_pages(query: Tensor, key: Tensor, near: Near, pages: int) -> Tensor:
    """The best pages of every query: int32 ``[B, HK, T, P]``, ascending; -1 where there are fewer.

    Of query ``[B, H, T, r]`` and key ``[B, HK, S, r]``; ``near`` says what is no page.
    """
    shape = (query.shape[0], key.shape[1], query.shape[2], pages)
    picked = torch.empty(shape, dtype=torch.int32, device=query.device)
    if picked.numel() == 0 or key.shape[2] == 0:
        return picked.fill_(-1)
    launch_heads(
        "choose pages",
        {"p_q": query, "p_k": key, "p_v": key},
        {"p_picked": picked, **near.tensors(query)},
        (layout_of(near.mask), near[1:], pages),
        (key.shape[1],),
        lambda chosen, values: _write(query, key, near, pages, values, chosen),
    )
    return picked


def _write(
    query: Tensor, key: Tensor, near: Near, wanted: int, values: dict[str, Any], chosen: Sizes
) -> Recipe:
    (batch, _, tokens, _), key_heads = query.shape, key.shape[1]
    lines, pages = batch * key_heads, cdiv(key.shape[2], near.page)
    members = power_of_two(query.shape[1] // key_heads)
    values |= near.numbers(query, key)
    values |= {"pages": pages, "P": wanted, "BR": members, "PEAKS": members > 1}
    tile = _rows_of(chosen.page_score, tokens, members)
    workspace: Workspace = {"p_peaks": (tuple(query.shape[:3]), torch.float32)}
    steps = []
    if members > 1:
        tiles = cdiv(tokens, tile.tokens // members)
        own = {"tiles": tiles, "BS": min(64, tile.across)}
        steps.append(over_tiles(kernels.near_peaks_kernel, (tiles * lines,), values, tile, **own))
    most = max(QUERIES, MOST_BYTES // (4 * lines * pages) // QUERIES * QUERIES)
    at_once = min(TOKENS, power_of_two(near.page))
    width = tile.across // at_once
    group = max(GROUP, width) if pages >= GROUPED * wanted else 0
    groups = cdiv(pages, group) if group else 0
    strip, row_tiles = max(STRIP, width), cdiv(min(tokens, most), tile.tokens // members)
    # Smaller programs rather than processors without one.
    while strip > max(GROUP, width) and lines * row_tiles * cdiv(pages, strip) < 4 * chosen.cores:
        strip //= 2
    values |= {"BP": width, "TOKENS": at_once, "ROUNDS": cdiv(near.page, at_once)}
    values |= {"IS_EVEN": near.page % at_once == 0, "STEPS": strip // width}
    values |= {"GROUP": group, "groups": groups}
    for first in range(0, tokens, most):
        count = min(most, tokens - first)
        own = {"first_query": first, "count": count}
        own |= {"row_tiles": cdiv(count, tile.tokens // members)}
        # Causal queries see no later pages.
        seen = values["ahead"] + first + count if near.causal else key.shape[2]
        shown = min(pages, cdiv(seen, near.page))
        own["page_tiles"] = cdiv(shown, strip)
        grid = (own["row_tiles"] * own["page_tiles"] * lines,)
        steps.append(over_tiles(kernels.page_scores_kernel, grid, values, tile, **own))
        steps += _pick(values | own, shown, lines, workspace)
    workspace["p_scores"] = ((lines, min(most, tokens), pages), torch.float32)
    workspace["p_tops"] = ((lines, min(most, tokens), groups), torch.float32)
    return Recipe(steps, workspace)


def _pick(values: dict[str, Any], candidates: int, lines: int, workspace: Workspace) -> list[Step]:
    """Rounds that leave the best of every segment until there is one: of groups, then of pages."""
    steps, wanted, group = [], values["P"], values["GROUP"]
    found, each, among = "p_scores", 1, {}
    if group:
        candidates = cdiv(candidates, group)
        among = {"pages": values["groups"], "page": values["page"] * group}
        among["p_scores"] = Place("p_tops")
    segment = max(SEGMENT, 2 * power_of_two(wanted))
    while True:
        wide = min(segment, max(32, power_of_two(candidates)))
        segments, warps = cdiv(candidates, wide), max(1, min(8, wide // OF_WARP))
        sets = 128 * warps
        is_last, left = segments == 1 and not among, f"p_left{len(steps)}"
        if not is_last:
            size = lines * values["count"] * segments * wanted
            workspace[left] = (max((size,), workspace.get(left, ((0,),))[0]), torch.int32)
        mine = {"candidates": candidates, "segments": segments, "WIDE": wide, "EACH": each}
        mine |= {"SETS": sets if wide >= 8 * sets and sets >= 2 * wanted else 0}
        mine |= {"FILL": power_of_two(wanted), "IS_FIRST": not steps}
        mine |= {"p_found": Place(found), "p_picked": Place("p_picked" if is_last else left)}
        mine |= {"rows": values["T"] if is_last else values["count"]}
        mine |= {"rows_before": values["first_query"] if is_last else 0}
        grid = (segments * values["count"] * lines,)
        steps.append(Step(kernels.pick_kernel, grid, values | among | mine, warps))
        if is_last:
            return steps
        found, candidates, each = left, segments * wanted, 1
        if segments == 1:
            among, each = {}, group
            candidates *= group


def _rows_of(tile: Tile, tokens: int, members: int) -> Tile:
    """The tile with fewer rows where there are only a few queries, and at least one query."""
    rows = max(16, members, min(tile.tokens, power_of_two(tokens) * members))
    return tile._replace(tokens=rows)
