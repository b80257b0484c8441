"""What a mask function lets through, found by asking it about pairs of positions.

Hugging Face nests the parts of a pattern (causal, window, packed sequences) in an order that
changes with its versions, so nothing is read from the nesting. The pattern is asked which tokens do
not see the one before them: there a sequence begins. What follows for other pairs is compared with
what the pattern says of many of them, and a pattern that says otherwise is refused.

Everything is asked on the CPU: a pattern that holds no tensors then makes no GPU wait.

Dimension legend: B batch, T queries, S keys, n pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from lln.errors import InvalidInputError

UNKNOWN_PATTERN = (
    "LLN attention cannot apply this model's pattern of masked pairs in linear time; give a 2-D "
    "attention_mask (under torch.compile and torch.export always, ones will do), or cu_seq_lens_q "
    "and cu_seq_lens_k for packed sequences."
)

# Every distance up to this one is probed, and powers of two beyond.
_NEAR = 8
# Of more queries than these, evenly spread ones are probed.
_QUERIES = 1024
# Hugging Face's patterns of numbers alone that were probed and hold no packed sequences, with what
# they were asked about: a model asks the same in every pass, and of many texts that takes long.
_without_sequences: set[Hashable] = set()
_MOST_KNOWN = 4096
_THEIRS = "transformers.masking_utils"


def packed_sequences(
    mask_function: Callable[..., Any],
    batch_size: int,
    queries: range,
    keys: range,
    window: int | None = None,
) -> Tensor | None:
    """The numbers of packed sequences, int64 ``[B, T]``; None if every row is one sequence.

    Args:
        mask_function: Of batch, head, query and key, as tensors that broadcast; True = attend.
        batch_size: B.
        queries: Their positions.
        keys: The positions of the keys.
        window: The width of a window inside the sequences, if there is one.

    Raises:
        InvalidInputError: Inside its sequences the pattern is neither causal nor bidirectional.
    """
    asked = (_ingredients(mask_function), batch_size, queries, keys, window)
    if asked in _without_sequences:
        return None
    row = torch.arange(batch_size, device="cpu")[:, None]

    def sees(query: Tensor, key: Tensor) -> Tensor:
        seen = mask_function(row, torch.zeros_like(row), query, key)
        return seen.to(row.device).expand(batch_size, -1)

    begins = torch.zeros(batch_size, len(keys), dtype=torch.bool, device="cpu")
    # A window of one token hides the one before it, too.
    if queries == keys and window != 1:
        place = torch.arange(keys.start, keys.stop, device="cpu")[None]
        begins[:, 1:] = ~sees(place[:, 1:], place[:, :-1])
    numbers = begins.cumsum(1)
    query, key = _pairs(begins, queries, keys, window)
    distance = query - key
    among = (query - keys.start).clamp(0, len(keys) - 1)
    same = numbers.gather(1, among) == numbers.gather(1, key - keys.start)
    reach = len(keys) + len(queries) if window is None else window
    causal = (distance >= 0) & (distance < reach)
    seen = sees(query, key)
    # Hugging Face counts the edge of a window as inside only where it looks both ways.
    if not any(torch.equal(seen, same & near) for near in (causal, distance.abs() <= reach)):
        raise InvalidInputError(UNKNOWN_PATTERN)
    if begins.any():
        return numbers
    if asked[0] is not None and len(_without_sequences) < _MOST_KNOWN:
        _without_sequences.add(asked)
    return None


def _ingredients(part: Any) -> Hashable:
    """What a pattern is made of, if that is Hugging Face's functions and numbers alone; else None.

    Tensors may say something else at the next call, and so may whatever other functions look up.
    """
    if isinstance(part, bool | int | float | str):
        return part
    if isinstance(part, FunctionType) and part.__module__ == _THEIRS:
        held = [cell.cell_contents for cell in part.__closure__ or ()]
        inside = tuple(_ingredients(one) for one in held)
        return None if None in inside else (part.__code__, *inside)
    if isinstance(part, tuple | list):
        inside = tuple(_ingredients(one) for one in part)
        return None if None in inside else inside
    return None


def _pairs(
    begins: Tensor, queries: range, keys: range, window: int | None
) -> tuple[Tensor, Tensor]:
    """Positions of queries and of keys to compare at, int64 ``[B, n]`` each.

    At many distances, and around both ends of every query's sequence.
    """
    batch, tokens = begins.shape
    query = torch.arange(queries.start, queries.stop, 1 + len(queries) // _QUERIES, device="cpu")
    longest = max(queries.stop - keys.start, keys.stop - queries.start)
    distances = {*range(_NEAR), *(1 << bit for bit in range(longest.bit_length()))}
    if window is not None:
        distances |= {window - 1, window, window + 1}
    distance = torch.tensor([*distances, *(-one for one in distances)], device="cpu")
    key = query[:, None] - distance
    inside = (key >= keys.start) & (key < keys.stop)
    far = query[:, None].expand_as(key)[inside].expand(batch, -1), key[inside].expand(batch, -1)

    place = torch.arange(tokens, device="cpu").expand(batch, -1)
    first = torch.where(begins, place, 0).cummax(1).values
    after = torch.where(begins, place, tokens).roll(-1, 1)
    after[:, -1] = tokens
    after = after.flip(1).cummin(1).values.flip(1)
    among = (query - keys.start).clamp(0, tokens - 1)
    ends = [end[:, among] for end in (first - 1, first, after - 1, after)]
    edges = torch.cat(ends, 1).clamp(0, tokens - 1) + keys.start
    return (
        torch.cat([far[0], query.repeat(batch, len(ends))], 1),
        torch.cat([far[1], edges], 1),
    )
