"""The concentration of a model's attention through its training (Figures 1, 8b, 9, 10b)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lln import checks
from lln.errors import InvalidInputError
from lln.instruments.capture import DEFAULT_INSTRUMENTS, capture
from lln.instruments.measurements import Measurements
from lln_lab.training_log.run_log import RunLog, read_records

_SCALARS = ("loss", "gradient_norm", "loss_scale")


class ConcentrationLogger:
    """Log temperature, entropy, spectral gap, α, β, gradient norm and loss scale as a model trains.

    On updates 1, n, 2n, … the first forward is measured with `capture`; all others run as if the
    logger were not there. Every logged update is a line of ``out/concentration.jsonl`` (values by
    layer and head) and, if TensorBoard is installed, a point of its curves (means over heads).

    In distributed training the first process logs what it sees, the others do nothing.

    Args:
        model: The model in training.
        out: Folder for the files.
        every: n.
        instruments: As in `capture`.
        resume_from: Updates done before, when training goes on from a checkpoint; later records in
            the file are replaced. None = a new run.
        tensorboard: Whether to write TensorBoard events; None = if it is installed.

    Example:
        >>> import tempfile
        >>> model = nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> optimiser = torch.optim.SGD(model.parameters())
        >>> with ConcentrationLogger(model, tempfile.mkdtemp(), every=2, tensorboard=False) as log:
        ...     for _ in range(4):
        ...         loss = model(torch.randn(1, 8, 16)).square().mean()
        ...         loss.backward()
        ...         _ = log.step(loss)
        ...         optimiser.step()
        ...         optimiser.zero_grad()
        >>> [record["step"] for record in log.records()]
        [1, 2, 4]
    """

    def __init__(
        self,
        model: nn.Module,
        out: str | Path,
        *,
        every: int = 100,
        instruments: Iterable[str] = DEFAULT_INSTRUMENTS,
        resume_from: int | None = None,
        tensorboard: bool | None = None,
    ) -> None:
        """Check the arguments and open the files."""
        checks.check_count("every", every)
        if resume_from is not None:
            checks.check_count("resume_from", resume_from, least=0)
        self.model, self.every, self.instruments = model, every, tuple(instruments)
        # Wrong arguments show now, not at the first logged step.
        capture(model, instruments=self.instruments)
        self.done = resume_from or 0
        self._log = None
        if not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0:
            self._log = RunLog(out, resume_from=resume_from, tensorboard=tensorboard)
        self._running: capture | None = None

    @property
    def is_due(self) -> bool:
        """Whether the update under way will be logged."""
        return self._log is not None and (self.done == 0 or (self.done + 1) % self.every == 0)

    def __enter__(self) -> ConcentrationLogger:
        """Watch the first forward, if it is due."""
        self.begin_step()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop watching and close the files."""
        self.close()

    def begin_step(self) -> None:
        """Watch the coming forward, if its update is due; `step` does this for the next one."""
        if self._running is None and self.is_due:
            # One forward only: nothing stays patched if training fails before `step` is called.
            self._running = capture(
                self.model, instruments=self.instruments, max_calls=1, one_forward=True
            )
            self._running.__enter__()

    def step(
        self,
        loss: float | Tensor | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        unscaled: bool = False,
    ) -> dict[str, Any] | None:
        """Log the update under way, if it is due; call it after every backward pass.

        Call it once per update, before ``optimiser.step()`` and ``zero_grad()``. With gradient
        accumulation that is after the last of the backward passes; the first forward is measured.

        Args:
            loss: Loss of the update.
            scaler: The gradient scaler of fp16 training; its scale is logged and taken out of the
                gradient norm.
            unscaled: Whether ``scaler.unscale_`` was called already.

        Returns:
            The record, if one was written.

        Raises:
            InvalidInputError: If the model shows no attention.
        """
        record = None
        if self.is_due:
            scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() else None
            norm = gradient_norm(self.model)
            if norm is not None and scale is not None and not unscaled:
                norm /= scale
            record = self.finish()
            record |= {"gradient_norm": norm}
            if loss is not None:
                record["loss"] = float(loss.detach() if isinstance(loss, Tensor) else loss)
            if scale is not None:
                record["loss_scale"] = scale
            self.write(record)
        self.done += 1
        self.begin_step()
        return record

    def finish(self) -> dict[str, Any]:
        """Stop watching; returns the record of the update, without loss and gradients.

        Raises:
            InvalidInputError: If the forward was not watched, or the model shows no attention.
        """
        running, self._running = self._running, None
        if running is None:
            raise InvalidInputError(
                "no forward was watched; use the logger as `with ConcentrationLogger(...) as log:` "
                "around the training loop."
            )
        running.__exit__(None, None, None)
        return {"step": self.done + 1, "layers": _by_layer(running), "problems": running.problems}

    def write(self, record: dict[str, Any]) -> None:
        """Append a record to the files."""
        if self._log is None:
            return
        scalars = {
            f"training/{name}": record[name]
            for name in _SCALARS
            if isinstance(record.get(name), float)
        }
        for layer, instruments in record["layers"].items():
            for name, heads in instruments.items():
                there = [value for value in heads if math.isfinite(value)]
                if there:
                    scalars[f"{name}/{layer or 'model'}"] = fmean(there)
        self._log.write(record, scalars)

    def records(self) -> list[dict[str, Any]]:
        """Everything in the file so far."""
        return [] if self._log is None else read_records(self._log.path)

    def close(self) -> None:
        """Stop watching and close the files."""
        if self._running is not None:
            self._running.stop()
            self._running = None
        if self._log is not None:
            self._log.close()


def gradient_norm(model: nn.Module) -> float | None:
    """Euclidean norm of all gradients together; None if there are none."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not gradients:
        return None
    return float(torch.nn.utils.get_total_norm(gradients))


def _by_layer(found: Measurements) -> dict[str, dict[str, list[float]]]:
    """Medians over the batch: ``{layer: {instrument: [one per head]}}``."""
    names = dict.fromkeys(name for call in found.calls for name in call.values)
    medians = {name: found.medians(name) for name in names}
    return {
        layer: {
            name: list(layers[layer].values()) for name, layers in medians.items() if layers[layer]
        }
        for layer in found.layers
    }
