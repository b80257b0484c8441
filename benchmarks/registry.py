"""What is timed: every case is an operation, a shape, a dtype and a pass.

Dimension legend: B batch, H heads, N tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import lln

# Matched values for unit-variance inputs at D = 64; any fixed number costs the same.
ALPHA = BETA = 2.27


@dataclass(frozen=True)
class Operation:
    """An attention function and the reference that judges it.

    Attributes:
        run: query, key, value → output.
        reference: The same in float64, N×N.
    """

    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    reference: Callable[[Tensor, Tensor, Tensor], Tensor]


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


def _given(query: Tensor, key: Tensor, value: Tensor, impl: str = "auto") -> Tensor:
    return lln.lln_attention(query, key, value, alpha=ALPHA, beta=BETA, impl=impl)


def _given_diag(query: Tensor, key: Tensor, value: Tensor, impl: str = "auto") -> Tensor:
    return lln.lln_diag_attention(query, key, value, alpha=ALPHA, beta=BETA, impl=impl)


def _given_causal(query: Tensor, key: Tensor, value: Tensor, impl: str = "auto") -> Tensor:
    return lln.lln_attention(query, key, value, alpha=ALPHA, beta=BETA, is_causal=True, impl=impl)


OPERATIONS = {
    "sdpa": Operation(F.scaled_dot_product_attention, lln.reference.softmax_attention),
    "sdpa_causal": Operation(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: lln.reference.softmax_attention(
            q, k, v, keep=lln.reference.causal_keep(q.shape[-2], q.device)
        ),
    ),
    "lln": Operation(_given, lambda q, k, v: _given(q, k, v, "reference")),
    "lln_matched": Operation(
        lln.lln_attention, lambda q, k, v: lln.lln_attention(q, k, v, impl="reference")
    ),
    "lln_diag": Operation(_given_diag, lambda q, k, v: _given_diag(q, k, v, "reference")),
    "lln_causal": Operation(_given_causal, lambda q, k, v: _given_causal(q, k, v, "reference")),
}


def cpu_cases(lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)) -> list[Case]:
    """B = 1, H = 12, D = 64 in float32, both passes, over the length."""
    return [
        Case(operation, 1, 12, tokens, 64, "float32", backward)
        for backward in (False, True)
        for tokens in lengths
        for operation in OPERATIONS
    ]


def make_inputs(case: Case, device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Gaussian query, key, value for a case; never zeros, which some hardware runs faster."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (case.batch, case.heads, case.tokens, case.width)
    query, key, value = (
        torch.randn(shape, generator=generator, device=device, dtype=getattr(torch, case.dtype))
        for _ in range(3)
    )
    return query, key, value
