"""How concentrated attention is while it is trained (Figure 1).

One batch that is never trained on is run through the model a few times on the way. Every instrument
gives one number per head; what is kept is their median over heads, layers and texts. It goes into
the history that checkpoints hold, so a training that was stopped keeps what it saw.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import torch
from torch import nn

from lln.instruments.capture import capture
from lln.integrations.transformers import transformers
from lln_lab.experiments.compiling import as_written
from lln_lab.experiments.methods import MAIN, Method
from lln_lab.experiments.tasks.task import as_batch

INSTRUMENTS = ("temperature", "entropy", "spectral_gap")
TEXTS = 4


def can_be_observed(method: Method) -> bool:
    """Whether the instruments know the weights of its attention: one matrix per head."""
    return all(
        system in MAIN and options.get("join") != "ratio" for system, options in method.systems
    )


class Observer(transformers.TrainerCallback):
    """Measures the first texts of a part after updates 1, n, 2n, …"""

    def __init__(self, examples: Any, every: int) -> None:
        """Keep the batch; ``every`` is n."""
        self.batch = as_batch(examples.__getitems__(list(range(min(TEXTS, len(examples))))))
        self.every = max(every, 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Add an entry to the history, if one is due."""
        step = state.global_step
        if step == 1 or step % self.every == 0:
            state.log_history.append({"observed": concentration(rest["model"], self.batch)})
            state.log_history[-1]["step"] = step

    def results(self, history: list[dict[str, Any]], model: nn.Module) -> dict[str, Any]:
        """``{"observed": {instrument: [[step, value], …]}}`` of a history."""
        seen = [(entry["step"], entry["observed"]) for entry in history if "observed" in entry]
        return {
            "observed": {name: [[step, one[name]] for step, one in seen] for name in INSTRUMENTS}
        }


def concentration(model: nn.Module, batch: dict[str, Any]) -> dict[str, float | None]:
    """The median of every instrument; None where that is not a finite number."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    with as_written(model), torch.no_grad(), capture(model, instruments=INSTRUMENTS) as seen:
        model(**{name: side.to(device) for name, side in batch.items()})
    model.train(was_training)
    found: dict[str, float | None] = {}
    for name in INSTRUMENTS:
        middle = median(one.values[name] for one in seen.records)
        found[name] = round(middle, 5) if math.isfinite(middle) else None
    return found
