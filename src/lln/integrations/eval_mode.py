"""A model in eval mode for a while, and then as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lln.integrations.attached import attached_to


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients, and back."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in model.modules():
            module.training = training.get(module, model.training)
        for module in model.modules():
            attached = attached_to(module)
            if attached is not None:
                attached.train(module.training)
