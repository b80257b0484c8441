"""Where the mass of softmax attention lies: in the window, on sinks, on chosen pages, or elsewhere.

Dimension legend: B samples, H query heads, Hk key heads, T tokens, C numbers of pages, G heads of a
group, P pages per query, r rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lln import checks, choose_pages
from lln.checks.printing import brief
from lln.eager.run import repeat_heads
from lln.instruments.attention_inputs import AttentionInputs
from lln.instruments.head_groups import head_groups, measure_all
from lln.instruments.rows import MOST_ROWS, TILE
from lln.instruments.unmasked_heads import UnmaskedHeads
from lln.integrations.settings import Settings
from lln_lab.inspection.key_masses import checked_numbers, drawn_rows


class PageMasses(NamedTuple):
    """Mean shares of a row of softmax attention, from 0 to 1; together they are 1.

    Attributes:
        window: ``[B, H]``, on the tokens nearby.
        sinks: ``[B, H]``, on the first tokens, where they are not nearby.
        chosen: ``[B, H, C]``, on the chosen pages beside both, for every number in ``pages``.
        rest: ``[B, H, C]``, on all others: what `lln.page_attention` would not see.
        pages: int ``[C]``, the numbers of pages.
    """

    window: Tensor
    sinks: Tensor
    chosen: Tensor
    rest: Tensor
    pages: Tensor

    def __repr__(self) -> str:
        """By shapes."""
        return brief(self, self._asdict())


def page_numbers(pages: int) -> tuple[int, ...]:
    """The numbers of pages to compare: from a quarter to four times as many."""
    return tuple(sorted({max(pages // part, 1) for part in (4, 2)} | {pages, 2 * pages, 4 * pages}))


def page_masses(
    query: Tensor,
    key: Tensor,
    *,
    pages: int | Iterable[int] | None = None,
    page_size: int | None = None,
    window: int | None = None,
    sinks: int | None = None,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    most_rows: int | None = 1024,
) -> PageMasses:
    """How much of softmax's attention a head has in its window, on sinks, on P pages and elsewhere.

    `lln.page_attention` reads the first three exactly and nothing of the rest, so a head that has
    little there keeps its output. Pages are chosen as it chooses them, by all channels. Sizes left
    out are those that a conversion gives a decoder (``is_causal``) or an encoder. Time O(N²·D) for
    every number of pages, memory O(N) and what `lln.choose_pages` takes.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, T, D]``, H a multiple of Hk; the heads of a key head choose together.
        pages: Numbers of pages to try, or one; None = a quarter to four times of what a conversion
            gives.
        page_size: Tokens in a page.
        window: How many tokens a query sees on either side, or before its own if ``is_causal``.
        sinks: How many first tokens every query sees.
        key_mask: bool ``[B, T]``, True = attend; padded queries do not count either.
        is_causal: Whether row i sees keys 0 … i only.
        scale: Factor of the scores; None = 1/√D.
        most_rows: Rows to measure of a longer sequence, at random but always the same ones; None =
            all.

    Returns:
        A `PageMasses`, float64; NaN as in `entropy`. A token counts in the first part it lies in.

    Raises:
        InvalidInputError: One sentence on what does not fit.

    Example:
        >>> import torch
        >>> query = torch.zeros(1, 2, 256, 8)
        >>> masses = page_masses(query, query, pages=(4, 8), window=0, sinks=0)
        >>> masses.window.tolist(), masses.rest[0, 0].tolist()
        ([[0.00390625, 0.00390625]], [0.7470703125, 0.498046875])
    """
    usual = Settings.usual_pages(is_causal)
    numbers = checked_numbers("pages", page_numbers(usual["pages"]) if pages is None else pages)
    if most_rows is not None:
        checks.check_count("most_rows", most_rows)
    form = {"page_size": page_size, "window": window, "sinks": sinks}
    form = {name: usual[name] if size is None else size for name, size in form.items()}
    seen = {"key_mask": key_mask, "is_causal": is_causal, "scale": scale}
    inputs = AttentionInputs(query, key, kind="window", window=form["window"], **seen)
    found = [choose_pages(query, key, each, enable_gqa=True, **form, **seen) for each in numbers]
    rows = _rows_and_pages(inputs, found, most_rows)

    def shares(heads: UnmaskedHeads) -> tuple[Tensor, ...]:
        return _shares(heads, *next(rows), form["sinks"], form["page_size"])

    near, first, chosen = measure_all(inputs, shares, ((), (), (len(numbers),)))
    rest = (1 - (near + first).unsqueeze(-1) - chosen).clamp_min(0.0)
    return PageMasses(near, first, chosen, rest, torch.tensor(numbers, device=near.device))


def _rows_and_pages(
    inputs: AttentionInputs, found: list[Tensor], most_rows: int | None
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """The rows to measure ``[r]`` and their pages ``[G, r, P]``, of all groups that are not empty.

    Args:
        inputs: The attention.
        found: Pages ``[B, Hk, T, P]`` of every query.
        most_rows: As in `page_masses`.
    """
    for group in head_groups(inputs):
        place = group.heads.block
        if not group.heads.query.numel():
            continue
        rows = drawn_rows(place.shape[0], most_rows, place.device)
        at = place[rows].to(inputs.query.device)
        own = (each[group.samples][:, :, at] for each in found)
        heads = inputs.query.shape[1]
        yield rows, [repeat_heads(each, heads).flatten(0, 1).to(place.device) for each in own]


def _shares(
    heads: UnmaskedHeads, rows: Tensor, pages: list[Tensor], sinks: int, page_size: int
) -> tuple[Tensor, ...]:
    """Mean masses in the window and on sinks, ``[G]`` each, and on pages ``[G, C]``."""
    count, tokens, _ = heads.query.shape
    step = max(TILE // (min(tokens, MOST_ROWS) * tokens), 1)
    found = []
    for start in range(0, count, step):
        own = [each[start : start + step] for each in pages]
        part = heads.part(start, start + step)
        found.append(_sum_rows(part, rows, own, sinks, page_size) / rows.shape[0])
    means = torch.cat(found)
    return means[:, 0], means[:, 1], means[:, 2:]


def _sum_rows(
    heads: UnmaskedHeads, rows: Tensor, pages: list[Tensor], sinks: int, page_size: int
) -> Tensor:
    """Sums over some rows of the masses in the window, on sinks and on pages, ``[G, 2 + C]``."""
    count, tokens, _ = heads.key.shape
    key = heads.key.mT.contiguous()
    # Masked tokens are left out, but have places, and belong to pages.
    within = heads.block - heads.block[:1]
    page = within // page_size
    total = heads.key.new_zeros(count, 2 + len(pages))
    for part in torch.arange(rows.shape[0]).split(max(TILE // (count * tokens), 1)):
        part = part.to(rows.device)
        scores = heads.scale * heads.query[:, rows[part]] @ key
        distance = within[rows[part], None] - within
        if heads.is_causal:
            scores = scores.masked_fill(distance < 0, -torch.inf)
        p = scores.softmax(-1)
        near = distance.abs() <= heads.window
        first = (within < sinks) & ~near
        far = p.masked_fill(near | first, 0.0)
        paged = far.new_zeros(*far.shape[:2], int(page[-1]) + 1).index_add_(-1, page, far)
        masses = [torch.where(side, p, 0.0).sum((-2, -1)) for side in (near, first)]
        for each in pages:
            chosen = each[:, part]
            mass = torch.where(chosen < 0, 0.0, paged.gather(-1, chosen.clamp_min(0)))
            masses.append(mass.sum((-2, -1)))
        total += torch.stack(masses, -1)
    return total
