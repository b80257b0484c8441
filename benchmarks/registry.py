"""What is timed: every case is an operation, a shape, a dtype and a pass.

Dimension legend: B batch, H heads, N tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

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


def _backend(name: str, causal: bool = False) -> Operation:
    """Softmax attention by one named backend of PyTorch."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, name)):
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    return Operation(run, OPERATIONS["sdpa_causal" if causal else "sdpa"].reference)


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(lambda q, k, v: _given(q, k, v, "eager"))


GPU_OPERATIONS = {
    "sdpa_flash": _backend("FLASH_ATTENTION"),
    "sdpa_cudnn": _backend("CUDNN_ATTENTION"),
    "lln": OPERATIONS["lln"],
    "lln_matched": OPERATIONS["lln_matched"],
    "lln_diag": OPERATIONS["lln_diag"],
    "lln_eager": Operation(lambda q, k, v: _given(q, k, v, "eager"), OPERATIONS["lln"].reference),
    "lln_compiled": Operation(lambda q, k, v: _compiled()(q, k, v), OPERATIONS["lln"].reference),
}

# Fewest tensors of the inputs' size that must move through memory: forward, forward + backward.
UNITS = {
    "lln": (4, 11),
    "lln_matched": (6, 13),
    "lln_diag": (6, 15),
    "lln_eager": (4, 11),
    "lln_compiled": (4, 11),
}


def gpu_cases(tokens_in_all: int = 65536) -> list[Case]:
    """bf16, H = 12, B·N = 65,536: D = 64 over the length; D = 32 and 128, and B = 1, at a few."""
    cases = []
    for backward in (False, True):
        for tokens in (512, 1024, 2048, 4096, 8192, 16384, 65536):
            for operation in GPU_OPERATIONS:
                if operation in ("lln_eager", "lln_compiled") and tokens != 4096:
                    continue
                batch = tokens_in_all // tokens
                cases.append(Case(operation, batch, 12, tokens, 64, "bfloat16", backward))
        for width in (32, 128):
            for tokens in (512, 4096, 16384):
                for operation in ("sdpa_cudnn", "sdpa_flash", "lln", "lln_diag"):
                    if operation == "lln_diag" and width > 64:
                        continue
                    batch = tokens_in_all // tokens
                    cases.append(Case(operation, batch, 12, tokens, width, "bfloat16", backward))
        for tokens in (512, 2048, 8192):
            for operation in ("sdpa_cudnn", "sdpa_flash", "lln", "lln_diag"):
                cases.append(Case(operation, 1, 12, tokens, 64, "bfloat16", backward))
    return cases


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
