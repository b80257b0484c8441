"""Training a host on a task, by Hugging Face's Trainer.

A run that was stopped goes on from its last checkpoint, with the same batches in the same order:
what comes out is what would have come out. Under ``torchrun`` the processes share every batch.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import Dataset

from lln.errors import InvalidInputError
from lln.integrations.transformers import transformers
from lln_lab.experiments.compiling import compile_encoder, explained
from lln_lab.experiments.tasks.task import as_batch
from lln_lab.recovery.work_folder import last_checkpoint, saving


class Watcher(Protocol):
    """A callback of the Trainer that notes what it sees in the history, which checkpoints hold."""

    def results(self, history: list[dict[str, Any]], model: nn.Module) -> dict[str, Any]:
        """What is to be kept of the history, at the end; may change the model."""
        ...


PRECISIONS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Recipe:
    """How a host is trained.

    Attributes:
        steps: Updates.
        batch: Examples per update.
        rate: Highest learning rate.
        warm_up: Share of the steps over which the rate rises; then it falls in a line.
        decay: Weight decay.
        clip: Largest norm of the gradient; 0 = any.
        precision: ``"float32"``, or autocast to ``"bfloat16"`` or ``"float16"``.
        saves: Checkpoints over the whole run.
        points: Points of the training curve.
        choices: How often the valid part is asked, so that its best weights count; 0 = the last
            weights count.
    """

    steps: int
    batch: int
    rate: float
    warm_up: float = 0.1
    decay: float = 0.0
    clip: float = 1.0
    precision: str = "float32"
    saves: int = 4
    points: int = 50
    choices: int = 0


def train(
    model: nn.Module,
    examples: Dataset,
    recipe: Recipe,
    folder: Path,
    seed: int,
    tell: Callable[[int], object] = lambda step: None,
    watchers: Sequence[Watcher] = (),
    compiled: bool = False,
) -> dict[str, Any]:
    """Train to the end, from the last checkpoint in the folder if there is one.

    Args:
        model: A host; trained in place.
        examples: To train on.
        recipe: How.
        folder: For checkpoints; whoever has kept the result removes it.
        seed: Of the order of the data.
        tell: Called after every step with its number.
        watchers: Callbacks that look at the model on the way; see `Watcher`.
        compiled: Whether `torch.compile` makes the encoder's training steps faster. Questions and
            instruments always see the model as it is written.

    Returns:
        The curve of the training loss, that of the loss scale under float16, what watchers saw,
        seconds (of all attempts), and peak memory in MiB on a GPU.
    """
    trainer = _trainer(model, examples, recipe, folder, seed)
    clock = _Clock(tell, trainer)
    trainer.add_callback(clock)
    for watcher in watchers:
        trainer.add_callback(watcher)
    for own in (transformers.ProgressCallback, transformers.PrinterCallback):
        trainer.remove_callback(own)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    if compiled:
        compile_encoder(model)
    start = last_checkpoint(folder)
    with explained():
        trainer.train(resume_from_checkpoint=None if start is None else str(start))
    # What the first process keeps on the last step, the others read next.
    trainer.accelerator.wait_for_everyone()
    history = trainer.state.log_history
    logged = [entry for entry in history if "loss" in entry]
    scales = [[entry["step"], entry["loss_scale"]] for entry in history if "loss_scale" in entry]
    on_gpu = torch.cuda.is_available()
    return {
        "curve": [[entry["step"], round(float(entry["loss"]), 5)] for entry in logged],
        # Of float16 on a GPU only: what keeps its gradients within range.
        **({"loss_scale": scales} if scales else {}),
        **{key: value for one in watchers for key, value in one.results(history, model).items()},
        "seconds": round(clock.seconds, 2),
        "compiled": compiled,
        "peak_mib": torch.cuda.max_memory_allocated() >> 20 if on_gpu else None,
    }


class _Clock(transformers.TrainerCallback):
    """Tells steps, and keeps the seconds of all attempts in the checkpoints."""

    def __init__(self, tell: Callable[[int], object], trainer: Any) -> None:
        self.tell, self.trainer = tell, trainer
        self.seconds = self.begun = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        before = [entry["spent"] for entry in state.log_history if "spent" in entry]
        # Of a training that was stopped after its last step, this is all.
        self.seconds = before[-1] if before else 0.0
        self.begun = time.perf_counter() - self.seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.seconds = time.perf_counter() - self.begun
        if state.global_step % args.save_steps == 0:
            state.log_history.append({"spent": self.seconds, "step": state.global_step})
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        if scaler is not None and state.global_step % args.logging_steps == 0:
            scale = float(scaler.get_scale())
            state.log_history.append({"loss_scale": scale, "step": state.global_step})
        self.tell(state.global_step)


def processes() -> tuple[int, int]:
    """Number of this process, and how many ``torchrun`` started."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def share_of_batch(batch: int) -> int:
    """Examples of a batch that every process takes, so that all together take the same."""
    count = processes()[1]
    if batch % count:
        raise InvalidInputError(
            f"a batch of {batch} cannot be shared by {count} processes; start a number of them "
            "that divides it."
        )
    return batch // count


def _trainer(model: nn.Module, examples: Dataset, recipe: Recipe, folder: Path, seed: int) -> Any:
    class WholeCheckpoints(transformers.Trainer):
        """A checkpoint that was not written to its end is not there."""

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            with saving(folder / f"checkpoint-{self.state.global_step}"):
                super()._save_checkpoint(*args, **kwargs)

    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=recipe.steps,
        per_device_train_batch_size=share_of_batch(recipe.batch),
        use_cpu=not torch.cuda.is_available(),
        learning_rate=recipe.rate,
        lr_scheduler_type="linear",
        warmup_steps=math.ceil(recipe.warm_up * recipe.steps),
        weight_decay=recipe.decay,
        max_grad_norm=recipe.clip,
        bf16=recipe.precision == "bfloat16",
        fp16=recipe.precision == "float16",
        logging_steps=max(recipe.steps // recipe.points, 1),
        save_steps=max(recipe.steps // (recipe.saves + 1), 1),
        save_total_limit=1,
        seed=seed,
        data_seed=seed,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = WholeCheckpoints(
        model=model, args=settings, train_dataset=examples, data_collator=as_batch
    )
    # The loss is a mean already.
    trainer.model_accepts_loss_kwargs = False
    return trainer
