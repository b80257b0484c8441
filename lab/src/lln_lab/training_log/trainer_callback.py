"""The concentration of attention through a run of Hugging Face's Trainer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from lln.errors import InvalidInputError
from lln.instruments.capture import DEFAULT_INSTRUMENTS
from lln.integrations import unavailable
from lln_lab.training_log.logger import ConcentrationLogger, gradient_norm

try:
    from transformers import TrainerCallback, TrainerState, TrainingArguments
except ImportError as error:
    raise unavailable(error) from error


class ConcentrationCallback(TrainerCallback):
    """Log what `lln_lab.training_log.ConcentrationLogger` logs, from inside a Trainer.

    Updates 1, n, 2n, … are measured. Where the Trainer logs on the same update, its loss and its
    gradient norm (before clipping) are taken over; otherwise the norm is measured after clipping,
    and the record says so if clipping had an effect. A run resumed from a checkpoint goes on in the
    same file, without duplicates.

    Args:
        out: Folder for ``concentration.jsonl`` and ``tensorboard/``; None = ``concentration`` in
            the Trainer's output folder.
        every: n; None = the Trainer's ``logging_steps``.
        instruments: As in `lln.instruments.capture`.
        overwrite: Whether a new run may replace the records of an old one in the same folder.
        tensorboard: Whether to write TensorBoard events; None = if it is installed.

    Example:
        ``Trainer(model, args, train_dataset=data, callbacks=[ConcentrationCallback()])``
    """

    def __init__(
        self,
        out: str | Path | None = None,
        *,
        every: int | None = None,
        instruments: Iterable[str] = DEFAULT_INSTRUMENTS,
        overwrite: bool = False,
        tensorboard: bool | None = None,
    ) -> None:
        """Keep the settings; files are opened when training begins."""
        self.out, self.every, self.instruments = out, every, tuple(instruments)
        self.overwrite, self.tensorboard = overwrite, tensorboard
        self._log: ConcentrationLogger | None = None
        self._pending: dict[str, Any] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any
    ) -> None:
        """Open the files, after the step of the checkpoint if there is one."""
        self._close()
        resumed = state.global_step > 0 or self.overwrite
        every = self.every if self.every is not None else _logging_steps(args, state)
        self._log = ConcentrationLogger(
            _model(kwargs),
            Path(args.output_dir or ".") / "concentration" if self.out is None else self.out,
            every=every,
            instruments=self.instruments,
            resume_from=state.global_step if resumed else None,
            tensorboard=self.tensorboard,
        )

    def on_step_begin(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Watch the forward, if its update is due."""
        self._flush()
        if self._log is not None:
            self._log.done = state.global_step
            self._log.begin_step()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any
    ) -> None:
        """Take the measurements, while the gradients are there."""
        if self._log is None or not self._log.is_due:
            return
        record = self._log.finish()
        norm = gradient_norm(_model(kwargs))
        record["gradient_norm"] = norm
        if norm is not None and args.max_grad_norm and norm >= 0.999 * args.max_grad_norm:
            record["gradient_norm_is_clipped"] = True
        scaler = getattr(kwargs.get("optimizer"), "scaler", None)
        if scaler is not None and scaler.is_enabled():
            record["loss_scale"] = scaler.get_scale()
        self._pending = record

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: Any,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Take over what the Trainer knows of the same update."""
        record, logs = self._pending, logs or {}
        if record is None or record["step"] != state.global_step:
            return
        if "loss" in logs:
            record["loss"] = float(logs["loss"])
        if logs.get("grad_norm") is not None:
            record["gradient_norm"] = float(logs["grad_norm"])
            record.pop("gradient_norm_is_clipped", None)
        self._flush()

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        """A checkpoint's own update is in the file before anything can go wrong."""
        self._flush()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Close the files."""
        self._close()

    def _flush(self) -> None:
        if self._log is not None and self._pending is not None:
            self._log.write(self._pending)
        self._pending = None

    def _close(self) -> None:
        self._flush()
        if self._log is not None:
            self._log.close()
            self._log = None


def _model(kwargs: dict[str, Any]) -> nn.Module:
    model = kwargs.get("model")
    if not isinstance(model, nn.Module):
        raise InvalidInputError(
            "ConcentrationCallback needs the model, which the Trainer did not pass; add the "
            "callback to a Trainer that was given a model or a model_init."
        )
    return model


def _logging_steps(args: TrainingArguments, state: TrainerState) -> int:
    """The Trainer's own interval; a fraction of the run counts as such."""
    steps = float(args.logging_steps)
    return max(round(steps if steps >= 1 else steps * state.max_steps), 1)
