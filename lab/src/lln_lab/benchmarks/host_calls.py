"""Calls at batch 1, which wait for the host: `lln_lab.benchmarks.launcher` times them.

Short sequences take the GPU less time than Python takes to ask for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HEADS, WIDTH = 12, 64
GIVEN = {"alpha": 2.0, "beta": 2.0}
TITLES = {
    "softmax": "softmax (SDPA)",
    "lln": "LLN",
    "lln matched": "LLN, matched",
    "lln_diag": "LLN + Diag",
    "lln_diag matched": "LLN + Diag, matched",
    "softmax causal": "softmax (SDPA), causal",
    "lln causal": "LLN, causal",
    "lln_diag causal": "LLN + Diag, causal",
}


def calls() -> dict[str, Callable[..., Any]]:
    """Name → the call."""
    from torch.nn.functional import scaled_dot_product_attention as softmax

    import lln

    causal = {"is_causal": True, **GIVEN}
    return {
        "softmax": softmax,
        "lln": lambda *sides: lln.lln_attention(*sides, **GIVEN),
        "lln matched": lln.lln_attention,
        "lln_diag": lambda *sides: lln.lln_diag_attention(*sides, **GIVEN),
        "lln_diag matched": lln.lln_diag_attention,
        "softmax causal": lambda *sides: softmax(*sides, is_causal=True),
        "lln causal": lambda *sides: lln.lln_attention(*sides, **causal),
        "lln_diag causal": lambda *sides: lln.lln_diag_attention(*sides, **causal),
    }
