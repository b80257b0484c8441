"""What a choice of exact keys by query hands to attention. Does not import Triton.

Dimension legend: B batch, H query heads, Hk key heads, T tokens, D head width, K keys per query, L
keys in a list.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Lists(NamedTuple):
    """The keys of every feature, and the queries by feature.

    A head has 2D features, [q, -q] and [k, -k]. A query sees the keys in the lists of its two
    strongest, outside its own block.

    Attributes:
        keys: int32 ``[1 or 2, B, Hk, 2D, L]``: the keys where a feature is largest, ascending; -1 =
            none. Where K is odd, the lists of a query's second feature are a table of their own,
            with one key fewer.
        features: int16 ``[B, H, 2, T]``, the strongest feature of every query and its second.
        order: int32 ``[B, H, 2T]``, entries sorted by feature: t is query t by its strongest
            feature, T + t by its second.
        starts: int32 ``[B, H, 2D + 1]``, where the entries of every feature begin in the order.
        members: int32 ``[B, Hk, T, 2D / 32]``, for every key a bit for each list that holds it.
    """

    keys: Tensor
    features: Tensor
    order: Tensor
    starts: Tensor
    members: Tensor


def list_shapes(query: Tensor, key: Tensor, keys: int) -> dict[str, tuple[int, ...]]:
    """The shapes of `Lists` for K keys."""
    batch, heads, tokens, width = query.shape
    key_heads = key.shape[1]
    return {
        "keys": (1 + keys % 2, batch, key_heads, 2 * width, (keys + 1) // 2),
        "features": (batch, heads, 2, tokens),
        "order": (batch, heads, 2 * tokens),
        "starts": (batch, heads, 2 * width + 1),
        "members": (batch, key_heads, tokens, (2 * width + 31) // 32),
    }
