"""The states of causal stretches as arguments of kernels, and the scan over them.

A stretch is a program's share of the tokens, a state the summary of all keys before it; in the
backward pass, what all rows after it contribute to the gradients of keys.
"""

from __future__ import annotations

from typing import Any

import torch

from lln.kernels.causal.triton_walk_states import scan_kernel
from lln.kernels.launching.recipes import Place, Step
from lln.kernels.launching.sizes import Sizes

# A state's three tensors; a suffix says which stretches it covers.
STATE = ("p_peak", "p_mass", "p_sum")


def state_of(suffix: str, parameters: str = "") -> dict[str, Any]:
    """Which state a kernel gets as ``p_peak``, ``p_mass`` and ``p_sum``."""
    return {name + parameters: Place(name + suffix) for name in STATE}


def scan_step(own: str, others: str, programs: int, chosen: Sizes, values: dict[str, Any]) -> Step:
    """Turn every stretch's own state into that of all stretches before (``_after``: after) it."""
    rows = min(8, chosen.width)
    values = values | state_of(own) | state_of(others, "_out")
    values |= {"ROWS": rows, "REVERSE": others == "_after"}
    return Step(scan_kernel, (chosen.width // rows, programs), values, 4)


def exponent_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which differences of exponents of such inputs are computed."""
    return torch.float64 if dtype == torch.float32 else torch.float32
