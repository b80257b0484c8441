"""Integer division of tensors, in a form that compilers get right."""

from __future__ import annotations

import torch
from torch import Tensor


def divided(number: Tensor, size: int) -> Tensor:
    """``number // size`` of integers from 0 on.

    In C++ for ARM, Inductor (torch 2.13) vectorises ``//`` wrongly, and indices made with it point
    anywhere: outputs and gradients are wrong without a word, or the process is aborted. Truncation,
    which is the same for these numbers, it gets right.
    """
    return torch.div(number, size, rounding_mode="trunc")
