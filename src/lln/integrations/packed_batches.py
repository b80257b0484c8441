"""Packed batches: several sequences in one row, told apart by boundaries or numbers.

Dimension legend: B batch, H heads, T tokens, D head width, n sequences,
L tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lln.errors import InvalidInputError
from lln.tracing import values_are_readable


def boundaries(kwargs: dict[str, Any], mask: Tensor | None, query: Tensor) -> Tensor | None:
    """``cu_seqlens [n + 1]`` over all B·T tokens, as given or from numbered tokens; None if dense.

    Args:
        kwargs: Of the attention call; may hold ``cu_seq_lens_q`` and ``cu_seq_lens_k``.
        mask: As `lln.integrations.masks.slicing_mask` returns it.
        query: ``[B, H, T, D]``.
    """
    given, of_keys = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if given is None and of_keys is not None:
        raise InvalidInputError("cu_seq_lens_k came without cu_seq_lens_q; pass both, equal.")
    if given is not None:
        if of_keys is not None and of_keys is not given and _differ(given, of_keys):
            raise InvalidInputError(
                "cu_seq_lens_q and cu_seq_lens_k must be equal: packed sequences attend to "
                "themselves."
            )
        if mask is not None and not is_packed(mask):
            raise InvalidInputError(
                "attention_mask and cu_seq_lens_q cannot be combined: packed sequences carry no "
                "padding; leave attention_mask out."
            )
        return given
    if mask is None or not is_packed(mask):
        return None
    # A sequence never goes on into the next row of the batch.
    begins = torch.ones_like(mask, dtype=torch.bool)
    begins[:, 1:] = mask[:, 1:] != mask[:, :-1]
    starts = begins.flatten().nonzero().squeeze(-1)
    return torch.cat([starts, starts.new_tensor([mask.numel()])])


def is_packed(mask: Tensor | None) -> bool:
    """Whether a mask numbers packed sequences."""
    return mask is not None and mask.dtype == torch.int64


def _differ(one: Tensor, two: Tensor) -> bool:
    """Whether the shapes differ, or the values, which are read only where that costs no wait."""
    if one.shape != two.shape:
        return True
    if not (values_are_readable(one) and values_are_readable(two)):
        return False
    return bool((one != two).any())


def numbered(cu_seqlens: Tensor, query: Tensor) -> Tensor:
    """The number of the sequence that every token belongs to, int64 ``[B, T]``."""
    batch, _, tokens, _ = query.shape
    place = torch.arange(batch * tokens, device=query.device)
    bounds = cu_seqlens[1:].to(place.dtype).contiguous()
    return torch.searchsorted(bounds, place, right=True).view(batch, tokens)


def inside_sequences(attention: Callable[..., Tensor], cu_seqlens: Tensor) -> Callable[..., Tensor]:
    """A function of packed sequences, for tensors ``[B, H, T, …]``.

    Args:
        attention: Takes query, key and value ``[B·T, H, …]`` and boundaries.
        cu_seqlens: The boundaries.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        mix = options.get("mix")
        if isinstance(mix, Tensor):
            options["mix"] = _packed(mix.expand(*query.shape[:3], -1))
        if options.get("choice") is not None:
            options["choice"] = tuple(map(_packed, options["choice"]))
        out = attention(*map(_packed, (query, key, value)), cu_seqlens, **options)
        return out.unflatten(0, (query.shape[0], -1)).transpose(1, 2)

    return attend


def padded(
    sides: tuple[Tensor, Tensor, Tensor], cu_seqlens: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Each packed sequence as a sample of its own: ``[n, H, L, …]``, and bool ``[n, L]``."""
    lengths = cu_seqlens.diff()
    mask = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]

    def pad(side: Tensor) -> Tensor:
        tokens = _packed(side)
        dense = tokens.new_zeros(*mask.shape, *tokens.shape[1:])
        dense[mask] = tokens.detach()
        return dense.transpose(1, 2)

    return (pad(sides[0]), pad(sides[1]), pad(sides[2])), mask


def _packed(tensor: Tensor) -> Tensor:
    """``[B, H, T, …]`` → ``[B·T, H, …]``."""
    return tensor.transpose(1, 2).flatten(0, 1)
