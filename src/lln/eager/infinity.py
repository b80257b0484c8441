"""Infinity in queries and keys, made visible.

An exponential turns minus infinity into a weight of zero, and a softmax over scores does so with
half of the infinities: the row or key would be left out without a word. NaN shows everywhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lln.tracing import values_are_readable


def as_nan(side: Tensor) -> Tensor:
    """The same queries or keys, with NaN in place of infinity; untouched if they are finite."""
    # A sum is the quickest pass over memory, and no infinity leaves it finite.
    if values_are_readable(side) and math.isfinite(side.detach().sum().item()):
        return side
    return torch.where(side.isinf(), torch.nan, side)
