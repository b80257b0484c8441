"""Checks that only the packed entry points need: the bounds of the sequences.

Dimension legend: T tokens of all sequences.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from lln.checks.arguments import check_count
from lln.checks.tensors import check_tensor, shape_of, wrong_device
from lln.errors import InvalidInputError
from lln.tracing import is_compiling, values_are_readable


def check_bounds(
    cu_seqlens: Tensor, max_seqlen: int | None, key_mask: Tensor | None, query: Tensor
) -> int | None:
    """Refuse bounds that do not fit packed queries ``[T, H, D]``, and any mask.

    Returns:
        The length of the longest sequence; None if it is unknown.
    """
    tokens = query.shape[0]
    check_tensor("cu_seqlens", cu_seqlens, "an int32 or int64 tensor")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise InvalidInputError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}.")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise InvalidInputError(
            f"cu_seqlens must be 1-D with one entry more than there are sequences, got shape "
            f"{shape_of(cu_seqlens)}."
        )
    if cu_seqlens.device != query.device:
        raise wrong_device("cu_seqlens", cu_seqlens, query.device)
    are_readable = values_are_readable(cu_seqlens)
    if are_readable:
        read_bounds(cu_seqlens, tokens)
    if key_mask is not None:
        raise InvalidInputError(
            "key_mask and cu_seqlens cannot be combined: packed sequences carry no padding; drop "
            "the masked tokens before packing, or use the dense function with key_mask."
        )
    if max_seqlen is not None:
        check_count("max_seqlen", max_seqlen, least=0)
    if are_readable and cu_seqlens.shape[0] > 1:
        found = int(cu_seqlens.diff().max())
        if max_seqlen is not None and found > max_seqlen:
            raise InvalidInputError(
                f"max_seqlen must be at least the longest sequence, {found}, got {max_seqlen}."
            )
        return max(found, 1)
    if max_seqlen is None:
        # A trace must not depend on the number of tokens.
        return None if is_compiling() else max(tokens, 1)
    return max(max_seqlen, 1)


def read_bounds(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """The values of sequence bounds, waited for and checked: on a GPU nobody has done so before."""
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise InvalidInputError(f"cu_seqlens must start at 0, got {bounds[0]}.")
    if bounds[-1] != tokens:
        raise InvalidInputError(
            f"cu_seqlens must end at the number of tokens {tokens}, got {bounds[-1]}."
        )
    for earlier, later in pairwise(bounds):
        if later < earlier:
            raise InvalidInputError(f"cu_seqlens must never decrease, got {later} after {earlier}.")
    return bounds
