"""A host's answers to all questions of a part, beside the right ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lln_lab.experiments.compiling import as_written
from lln_lab.experiments.tasks.task import as_batch


@torch.no_grad()
def answers(
    model: Any, examples: Dataset, batch: int, precision: str = "float32"
) -> tuple[np.ndarray, np.ndarray, float]:
    """Answers and right answers to all questions, and the mean loss."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    given, right, loss = [], [], 0.0
    for entry in DataLoader(examples, batch_size=batch, collate_fn=as_batch):
        sent: dict[str, Tensor] = {name: side.to(device) for name, side in entry.items()}
        kind = getattr(torch, precision)
        narrow = torch.autocast(device.type, kind, enabled=precision != "float32")
        with narrow, as_written(model):
            output = model(**sent)
        found, expected = model.questions(output, sent["labels"])
        given.append(found.cpu().numpy())
        right.append(expected.cpu().numpy())
        loss += float(output["loss"]) * len(expected)
    model.train(was_training)
    asked = sum(map(len, right))
    return np.concatenate(given), np.concatenate(right), loss / max(asked, 1)


def accuracy(given: np.ndarray, right: np.ndarray) -> dict[str, float]:
    """The share of right answers."""
    return {"accuracy": float((given == right).mean()) if len(right) else 0.0}
