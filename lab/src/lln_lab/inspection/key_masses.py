"""Where the mass of softmax attention lies: in the own block, on chosen keys, or on the rest.

Dimension legend: B samples (or packed sequences), H query heads, C numbers of keys, G heads of a
group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln import checks
from lln.checks.printing import brief
from lln.errors import InvalidInputError
from lln.instruments.attention_inputs import AttentionInputs
from lln.instruments.chosen_keys import ChosenKeys
from lln.instruments.head_groups import head_groups, measure_all
from lln.instruments.rows import MOST_ROWS, TILE
from lln.instruments.unmasked_heads import UnmaskedHeads

KEYS = (16, 32, 64, 128, 256)


class KeyMasses(NamedTuple):
    """Mean shares of a row of softmax attention, from 0 to 1; together they are 1.

    Attributes:
        block: ``[B, H]``, on the keys of the own block.
        chosen: ``[B, H, C]``, on the keys chosen outside it, for every number in ``keys``.
        rest: ``[B, H, C]``, on all others: what the slots of `lln.lln_keys_attention` carry.
        keys: int ``[C]``, the numbers of keys.
    """

    block: Tensor
    chosen: Tensor
    rest: Tensor
    keys: Tensor

    def __repr__(self) -> str:
        """By shapes."""
        return brief(self, self._asdict())


def key_masses(
    query: Tensor,
    key: Tensor,
    *,
    keys: int | Iterable[int] = KEYS,
    block_size: int = 64,
    group_size: int | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    most_rows: int | None = 1024,
) -> KeyMasses:
    """How much of softmax's attention a head has in its block, on K chosen keys and elsewhere.

    A head whose block and chosen keys hold most of the mass is reproduced by
    `lln.lln_keys_attention` with that many keys; what is left, its D slots have to carry. Time
    O(rows·N·D), memory O(N).

    Args:
        query: ``[B, H, T, D]``; ``[T, H, D]`` with ``cu_seqlens``.
        key: ``[B, Hk, T, D]``, H a multiple of Hk, or ``[T, Hk, D]``.
        keys: Numbers of keys to try, or one.
        block_size: Tokens in a block.
        group_size: Queries that share their chosen keys, see `lln.choose_keys`.
        key_mask: bool ``[B, T]``, True = attend; padded queries do not count either.
        scale: Factor of the scores; None = 1/√D.
        cu_seqlens: int ``[n + 1]``, boundaries of packed sequences; B is then n.
        most_rows: Rows to measure of a longer sequence, at random but always the same ones; None =
            all.

    Returns:
        A `KeyMasses`, float64; NaN as in `entropy`.

    Raises:
        InvalidInputError: One sentence on what does not fit.

    Example:
        >>> import torch
        >>> query = torch.zeros(1, 2, 256, 8)
        >>> masses = key_masses(query, query, keys=(64, 128), block_size=64)
        >>> masses.block.tolist(), masses.chosen[0, 0].tolist(), masses.rest[0, 0].tolist()
        ([[0.25, 0.25]], [0.25, 0.5], [0.5, 0.25])
    """
    numbers = checked_numbers("keys", keys)
    if most_rows is not None:
        checks.check_count("most_rows", most_rows)
    options: dict[str, Any] = {
        "block_size": block_size,
        "group_size": group_size,
        "key_mask": key_mask,
        "scale": scale,
        "cu_seqlens": cu_seqlens,
    }
    # α, β and the offset belong to the slots, which are not looked at.
    options |= {"kind": "lln_keys", "alpha": 1.0, "beta": 1.0, "offset": 0.0}
    first, *others = (AttentionInputs(query, key, keys=number, **options) for number in numbers)
    choices = [_choices(inputs) for inputs in others]

    def shares(heads: UnmaskedHeads) -> tuple[Tensor, Tensor]:
        assert heads.chosen is not None
        return _shares(heads, [heads.chosen, *(next(each) for each in choices)], most_rows)

    block, chosen = measure_all(first, shares, ((), (len(numbers),)))
    rest = (1 - block.unsqueeze(-1) - chosen).clamp_min(0.0)
    return KeyMasses(block, chosen, rest, torch.tensor(numbers, device=block.device))


def checked_numbers(name: str, given: int | Iterable[int]) -> tuple[int, ...]:
    """One number of keys or pages, or several, as a tuple.

    Raises:
        InvalidInputError: If it is anything else.
    """
    if isinstance(given, (Tensor, str)) or not isinstance(given, (int, Iterable)):
        raise InvalidInputError(
            f"{name} must be a number of {name} or several, such as (16, 64), got "
            f"{type(given).__name__}."
        )
    numbers = (given,) if isinstance(given, int) else tuple(given)
    if not numbers:
        raise InvalidInputError(f"{name} must hold at least one number of {name}, got none.")
    for number in numbers:
        checks.check_count(name, number, 0)
    return numbers


def drawn_rows(tokens: int, most_rows: int | None, device: torch.device) -> Tensor:
    """All rows, ascending, or so many of them at random, always the same ones."""
    rows = torch.arange(tokens, device=device)
    if most_rows is None or tokens <= most_rows:
        return rows
    # Not evenly spaced: a step of a block would always meet the same place in it.
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.randperm(tokens, generator=generator, device="cpu")[:most_rows]
    return rows[drawn.sort().values.to(device)]


def _choices(inputs: AttentionInputs) -> Iterator[ChosenKeys]:
    """The chosen keys of every group of heads that is not empty, without the heads."""
    for group in head_groups(inputs):
        if group.heads.query.numel() and group.heads.chosen is not None:
            yield group.heads.chosen


def _shares(
    heads: UnmaskedHeads, choices: list[ChosenKeys], most_rows: int | None
) -> tuple[Tensor, Tensor]:
    """Mean masses in the block ``[G]`` and on the chosen keys ``[G, C]``."""
    count, tokens, _ = heads.query.shape
    rows = drawn_rows(tokens, most_rows, heads.query.device)
    step = max(TILE // (min(tokens, MOST_ROWS) * tokens), 1)
    found = []
    for start in range(0, count, step):
        own = [each.part(start, start + step) for each in choices]
        found.append(_sum_rows(heads.part(start, start + step), own, rows) / rows.shape[0])
    means = torch.cat(found)
    return means[:, 0], means[:, 1:]


def _sum_rows(heads: UnmaskedHeads, choices: list[ChosenKeys], rows: Tensor) -> Tensor:
    """Sums over some rows of the masses in the block and on the chosen keys, ``[G, 1 + C]``."""
    count, tokens, _ = heads.key.shape
    key = heads.key.mT.contiguous()
    total = heads.key.new_zeros(count, 1 + len(choices))
    for part in rows.split(max(TILE // (count * tokens), 1)):
        scores = heads.scale * heads.query[:, part] @ key
        p = scores.softmax(-1)
        near = heads.block[part, None] == heads.block
        masses = [torch.where(near, p, 0.0).sum((-2, -1))]
        for chosen in choices:
            place = chosen.indices[:, chosen.group[part]]
            mass = torch.where(place < 0, 0.0, p.gather(-1, place.clamp_min(0)))
            masses.append(mass.sum((-2, -1)))
        total += torch.stack(masses, -1)
    return total
