"""Gradients of weights that every rank has a copy of."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lln.parallel.collectives import named
from lln.parallel.ranks import find_ranks


def sum_gradients(model: nn.Module, group: Any = None) -> None:
    """Add up what the tokens of all ranks contribute to the gradients of a model's weights.

    For a loss that is divided by the number of tokens of *all* ranks, every rank then has the
    gradients of one process. DDP and FSDP do this themselves, and divide by the number of ranks.

    Args:
        model: After ``backward``. A weight that this rank's tokens did not use contributes zeros.
        group: A process group, or one axis of a ``DeviceMesh``; None = all processes.

    Raises:
        PeerError: If another rank stops, does not come, or has another model.
    """
    operation = "lln.parallel.sum_gradients"
    ranks = find_ranks(group, operation)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            with named(ranks.name, f"{operation}: adding up the gradients of {name}"):
                dist.all_reduce(weight.grad, group=ranks.group())
