"""Which weights of a training count: those that answer most of the valid part right.

The sets are small, and a host that is trained for long enough knows its training part by heart. So
the valid part is asked a few times on the way, and the best weights are taken at the end. The test
part decides nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lln.files import replacing
from lln.integrations.transformers import transformers
from lln_lab.experiments.answering import accuracy, answers
from lln_lab.saved_data import read_saved


class Chooser(transformers.TrainerCallback):
    """Asks the valid part after every n updates, and keeps the weights of every new best.

    What was asked goes into the history that checkpoints hold. Weights lie under the number of
    their step, so a training that was stopped finds those that its history names.
    """

    def __init__(self, examples: Any, every: int, batch: int, precision: str, folder: Path) -> None:
        """Keep the settings; ``every`` is n, ``folder`` where the weights are kept."""
        self.examples, self.every = examples, max(every, 1)
        self.batch, self.precision, self.folder = batch, precision, folder

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Ask, if it is time."""
        step, model = state.global_step, rest["model"]
        if step % self.every and step != state.max_steps:
            return
        given, right, _ = answers(model, self.examples, self.batch, self.precision)
        found, best = accuracy(given, right)["accuracy"], self._best(state.log_history)
        state.log_history.append({"valid": found, "step": step})
        if state.is_world_process_zero and (best is None or found > best["valid"]):
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._path(step)) as file:
                torch.save(model.state_dict(), file)

    def results(self, history: list[dict[str, Any]], model: nn.Module) -> dict[str, Any]:
        """Put the best weights into the model; returns what was found, and the chosen step."""
        asked = [[entry["step"], entry["valid"]] for entry in history if "valid" in entry]
        best = self._best(history)
        if best is None:
            return {}
        device = next(model.parameters()).device
        what, fix = "the weights of a training", "remove its folder to train again"
        weights = read_saved(self._path(best["step"]), dict, what, fix, device)
        model.load_state_dict(weights)
        return {"valid": asked, "chosen": best["step"]}

    def _best(self, history: list[dict[str, Any]]) -> dict[str, Any] | None:
        """The first of the best entries."""
        return max((one for one in history if "valid" in one), key=_valid, default=None)

    def _path(self, step: int) -> Path:
        return self.folder / f"best-{step}.pt"


def _valid(entry: dict[str, Any]) -> float:
    return entry["valid"]
