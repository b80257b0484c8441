"""What one measurement is, and the tensors it runs on.

Dimension legend: B batch, H heads, N tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Case:
    """One thing to time."""

    operation: str
    batch: int
    heads: int
    tokens: int
    width: int
    dtype: str
    backward: bool

    @property
    def name(self) -> str:
        """How the case is printed and found again in the results."""
        what = "forward+backward" if self.backward else "forward"
        shape = f"B{self.batch} H{self.heads} N{self.tokens} D{self.width}"
        return f"{self.operation} {what} {shape} {self.dtype}"

    @property
    def unit_bytes(self) -> int:
        """Bytes of one tensor ``[B, H, N, D]``: the unit that floors are counted in."""
        size = torch.empty(0, dtype=getattr(torch, self.dtype)).element_size()
        return self.batch * self.heads * self.tokens * self.width * size


@dataclass(frozen=True)
class Layout:
    """How an operation expects its tensors.

    Attributes:
        make: Draws the inputs of a case; never zeros, which some hardware runs faster.
        few: The part of a tensor that is compared with float64: the last sample, which is furthest
            in memory, of the first and the last head.
    """

    make: Callable[[Case, str, int], tuple[Tensor, ...]]
    few: Callable[[Tensor], Tensor]


def sequence_ends(batch: int, tokens: int) -> list[int]:
    """Ends of packed sequences, alternately half and one and a half times ``tokens`` long.

    Example:
        >>> sequence_ends(3, 8)
        [0, 4, 16, 24]
    """
    ends = [0]
    for index in range(batch):
        short = index % 2 == 0 and index + 1 < batch
        longer = tokens + tokens // 2 if index % 2 else tokens
        ends.append(ends[-1] + (tokens - tokens // 2 if short else longer))
    return ends


def _normal(case: Case, device: str, seed: int, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    return tuple(
        torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes
    )


def _dense(case: Case, device: str, seed: int) -> tuple[Tensor, ...]:
    shape = (case.batch, case.heads, case.tokens, case.width)
    return _normal(case, device, seed, shape, shape, shape)


def _tokens_first(case: Case, device: str, seed: int) -> tuple[Tensor, ...]:
    shape = (case.batch, case.tokens, case.heads, case.width)
    return _normal(case, device, seed, shape, shape, shape)


def _positive_tokens_first(case: Case, device: str, seed: int) -> tuple[Tensor, ...]:
    """Positive queries and keys, as after a feature map, so that the normaliser cannot vanish."""
    query, key, value = _tokens_first(case, device, seed)
    return F.elu(query) + 1, F.elu(key) + 1, value


def _packed(case: Case, device: str, seed: int) -> tuple[Tensor, ...]:
    shape = (case.batch * case.tokens, case.heads, case.width)
    ends = torch.tensor(sequence_ends(case.batch, case.tokens), dtype=torch.int32, device=device)
    return *_normal(case, device, seed, shape, shape, shape), ends


def _decode(case: Case, device: str, seed: int) -> tuple[Tensor, ...]:
    """Query, key and value of the new token, then the earlier keys and values."""
    new = (case.batch, case.heads, 1, case.width)
    old = (case.batch, case.heads, case.tokens, case.width)
    return _normal(case, device, seed, new, new, new, old, old)


def _ends_of(tensor: Tensor, dim: int) -> Tensor:
    last = tensor.shape[dim] - 1
    return tensor.index_select(dim, torch.tensor(sorted({0, last}), device=tensor.device))


DENSE = Layout(_dense, lambda tensor: _ends_of(tensor[-1:], 1))
POSITIVE_TOKENS_FIRST = Layout(_positive_tokens_first, lambda tensor: _ends_of(tensor[-1:], 2))
TOKENS_FIRST = Layout(_tokens_first, lambda tensor: _ends_of(tensor[-1:], 2))
PACKED = Layout(_packed, lambda tensor: _ends_of(tensor, 1) if tensor.dim() == 3 else tensor)
DECODE = Layout(_decode, lambda tensor: _ends_of(tensor[-1:], 1))
