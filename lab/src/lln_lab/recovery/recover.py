"""Recovery training: teach a converted model to do what it did with softmax.

    from lln.integrations.convert import convert
    from lln_lab.recovery.recover import recover

    convert(model, calibrate=batch, statistics="running")
    recover(model, dataset, output_dir="recovery")

Two phases, each run by Hugging Face's ``Trainer`` (CPU, one GPU, or several under ``torchrun``):

1. *Layers.* Every attention module is given the inputs its softmax original sees, and learns to
   give that module's output. All layers learn side by side; none sees another's mistakes.
2. *Output.* The whole model learns to give the original's output.

An interrupted run goes on from its last checkpoint when it is started again.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lln.checks.reading import first_line, read_json
from lln.errors import BackendUnavailableError, InvalidInputError
from lln.files import write_atomically, writing
from lln.integrations.attached import KeptSoftmax, attach
from lln.integrations.loading import indexed_files
from lln.integrations.settings import Settings
from lln.integrations.short_calls import end_softmax
from lln.integrations.transformers import find_module, transformers
from lln_lab.recovery.recovery_loss import OutputLoss, RecoveryLoss, check_end_loss, measure
from lln_lab.recovery.work_folder import last_checkpoint, locked, saving

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PHASES = ("layers", "output")

# What `Recovery` is written as.
_REPORT = {
    "before": float,
    "after_layers": (float, None),
    "after": (float, None),
    "layers_before": [float],
    "layers_after": [float],
    "done": [frozenset(PHASES)],
}

_TRAINER_STATE = {
    "global_step": int,
    "max_steps": int,
    "epoch": (float, None),
    "log_history": [dict],
    "stateful_callbacks": dict,
}

_TOKENIZE = (
    "make them with tokenizer(text, padding='max_length', truncation=True, max_length=128), one "
    "text at a time"
)


@dataclass
class Recovery:
    """How far a model is from its softmax original, as ‖difference‖ / ‖original‖.

    Attributes:
        before: Of the model's output, after conversion.
        after_layers: After the first phase.
        after: After both.
        layers_before: Of every attention module's output on the original's inputs.
        layers_after: Likewise, after both phases.
        done: Phases that are complete.
    """

    before: float = 0.0
    after_layers: float | None = None
    after: float | None = None
    layers_before: list[float] = field(default_factory=list)
    layers_after: list[float] = field(default_factory=list)
    done: list[str] = field(default_factory=list)


def recover(
    model: PreTrainedModel,
    dataset: Dataset[Any],
    *,
    output_dir: str | Path,
    teacher: PreTrainedModel | None = None,
    probe: dict[str, Tensor] | None = None,
    layer_steps: int = 500,
    end_steps: int = 500,
    batch_size: int = 16,
    layer_learning_rate: float = 1e-3,
    end_learning_rate: float = 1e-4,
    end_loss: str | OutputLoss = "auto",
    save_steps: int = 100,
    seed: int = 0,
    on_start: Callable[[Path | None], object] = lambda checkpoint: None,
    on_step: Callable[[str, int, int, float], object] | None = None,
    **training: Any,
) -> Recovery:
    """Train a converted model, in place, to imitate its softmax original.

    Args:
        model: Converted, its weights otherwise as they were.
        dataset: Of the model's inputs: dictionaries of tensors without a batch dimension, all of
            one length, with ``attention_mask`` where there is padding. Labels are not needed.
        output_dir: For checkpoints and the report; running again with it resumes.
        teacher: The original; None = the model itself, with softmax instead. See
            `softmax_teacher`.
        probe: A batch to measure on; None = the first ``batch_size`` entries of the dataset.
        layer_steps: Steps of the first phase; 0 = without it.
        end_steps: Steps of the second.
        batch_size: Per device.
        layer_learning_rate: Of the first phase.
        end_learning_rate: Of the second.
        end_loss: What the second phase compares: ``"hidden"`` (relative squared error of the last
            hidden state), ``"logits"`` (divergence of the predicted distributions), ``"embedding"``
            (cosine of the mean hidden state and the hidden state itself), ``"auto"`` (logits if
            there are any, else hidden), or a function of the two outputs and the inputs.
        save_steps: Steps between checkpoints.
        seed: Of the order of the data.
        on_start: Called once nothing is left to refuse, with the checkpoint that training goes on
            from; None = from the start.
        on_step: Called after every step with the phase, the step, their number and the last loss,
            by the first process; None = Trainer shows its own bar.
        **training: Further arguments of ``transformers.TrainingArguments``.

    Returns:
        The report, also in ``output_dir/recovery.json``.

    Raises:
        InvalidInputError: One sentence, before anything is trained: also if another process trains
            in ``output_dir``.
        WriteError: If the disk is full; the last whole checkpoint is kept.
    """
    try:
        import accelerate  # noqa: F401
    except ImportError as error:
        raise BackendUnavailableError(
            "recovery training needs accelerate; pip install 'lln[hf]'."
        ) from error
    folder = Path(output_dir)
    # What is measured before it learns is exact keys, too.
    end_softmax(model)
    teacher = softmax_teacher(model) if teacher is None else teacher
    names = layer_names(teacher)
    if probe is None:
        probe = _collate(
            [dataset[index] for index in range(min(batch_size, len(cast("Sized", dataset))))]
        )
    check_end_loss(end_loss, teacher, probe)
    steps = {"layers": layer_steps, "output": end_steps}
    rates = {"layers": layer_learning_rate, "output": end_learning_rate}
    with locked(folder):
        report = _read(folder)
        on_start(_check_checkpoints(model, folder, report, [p for p in PHASES if steps[p] > 0]))
        if not report.done:
            report.before, report.layers_before = measure(model, teacher, names, probe)
        for phase in PHASES:
            if steps[phase] == 0:
                continue
            if phase in report.done:
                load_checkpoint(model, folder / phase / "final")
                continue
            trainer = _trainer(
                RecoveryLoss(model, teacher, names, phase, end_loss),
                dataset,
                folder / phase,
                max_steps=steps[phase],
                learning_rate=rates[phase],
                per_device_train_batch_size=batch_size,
                save_steps=save_steps,
                seed=seed,
                **training,
            )
            if on_step is not None:
                _tell_steps(trainer, partial(on_step, phase))
            last = last_checkpoint(folder / phase)
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
            with writing(folder / phase, "its last checkpoint is kept, where training goes on"):
                trainer.save_model(str(folder / phase / "final"))
            moved, layers = measure(model, teacher, names, probe)
            if phase == "layers":
                report.after_layers = moved
            report.after, report.layers_after = moved, layers
            report.done.append(phase)
            if trainer.is_world_process_zero():
                _write(folder, report)
            trainer.accelerator.wait_for_everyone()
    model.requires_grad_(True)
    return report


def softmax_teacher(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a converted model that computes softmax attention in every layer.

    Its layers get the very masks that the converted ones get, so that inputs can be handed over.
    """
    settings = Settings.of(model.config)
    if not settings.layers:
        raise InvalidInputError(
            "recovery training needs a converted model; call "
            "lln.integrations.convert.convert(model, ...) first."
        )
    teacher = copy.deepcopy(model)
    for name in settings.layers:
        module = find_module(teacher, name)
        if module is not None:
            attach(module, KeptSoftmax())
    return teacher.requires_grad_(False).eval()


def layer_names(model: PreTrainedModel) -> list[str]:
    """The attention modules of a converted model."""
    return list(Settings.of(model.config).layers or {})


def _trainer(imitation: RecoveryLoss, dataset: Dataset[Any], folder: Path, **options: Any) -> Any:
    """A Trainer whose checkpoints are folders that ``from_pretrained`` loads."""

    class RecoveryTrainer(transformers.Trainer):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            # Under the names the model itself uses, so that `load_checkpoint` finds them.
            imitation.student.save_pretrained(output_dir or str(folder), save_original_format=False)

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            with saving(folder / f"checkpoint-{self.state.global_step}"):
                super()._save_checkpoint(*args, **kwargs)

        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
            load_checkpoint(imitation.student, Path(resume_from_checkpoint))

        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            with nullcontext() if checkpoint is None else _reading(Path(checkpoint)):
                super()._load_optimizer_and_scheduler(checkpoint)

        def _load_rng_state(self, checkpoint: str | None) -> None:
            with nullcontext() if checkpoint is None else _reading(Path(checkpoint)):
                super()._load_rng_state(checkpoint)

    defaults = {
        "output_dir": str(folder),
        "logging_steps": 10,
        "report_to": [],
        "remove_unused_columns": False,
        "dataloader_pin_memory": torch.cuda.is_available(),
        "ddp_find_unused_parameters": True,
        "lr_scheduler_type": "cosine",
        "warmup_steps": min(50, options["max_steps"] // 10),
        "save_total_limit": 2,
    }
    trainer = RecoveryTrainer(
        model=imitation,
        args=transformers.TrainingArguments(**(defaults | options)),
        train_dataset=dataset,
        data_collator=_collate,
    )
    # The loss is a mean already; Trainer would take **inputs for a promise to divide it.
    trainer.model_accepts_loss_kwargs = False
    return trainer


def _tell_steps(trainer: Any, tell: Callable[[int, int, float], object]) -> None:
    """Call a function after every step, instead of what Trainer prints."""

    class Told(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.is_world_process_zero:
                logged = (entry["loss"] for entry in reversed(state.log_history) if "loss" in entry)
                tell(state.global_step, state.max_steps, next(logged, math.nan))

    for own in (transformers.ProgressCallback, transformers.PrinterCallback):
        trainer.remove_callback(own)
    trainer.add_callback(Told())


def _collate(entries: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    if not entries or not isinstance(entries[0], Mapping):
        found = f"got {type(entries[0]).__name__}" if entries else "it is empty"
        raise InvalidInputError(
            f"the dataset must hold dictionaries of the model's inputs, {found}; {_TOKENIZE}."
        )
    columns = {
        name: [torch.as_tensor(entry[name]) for entry in entries]
        for name in entries[0]
        if name != "labels"
    }
    for name, column in columns.items():
        shapes = sorted({tuple(entry.shape) for entry in column})
        if len(shapes) > 1:
            raise InvalidInputError(
                f"the dataset's entries must be of one length, {name} has shapes {shapes[0]} and "
                f"{shapes[-1]}; {_TOKENIZE}."
            )
    return {name: torch.stack(column) for name, column in columns.items()}


def load_checkpoint(model: PreTrainedModel, folder: Path) -> None:
    """Put a checkpoint's weights and statistics into a model, whatever submodules it has."""
    # Here, because without transformers it is missing too, and their sentence is ours to give.
    from safetensors.torch import load_file

    saved: dict[str, Tensor] = {}
    for file in check_checkpoint(model, folder):
        saved |= load_file(file)
    model.load_state_dict(saved, strict=False)


def check_checkpoint(model: PreTrainedModel, folder: Path) -> list[Path]:
    """Refuse a checkpoint that is broken or of another model; returns its files."""
    from safetensors import safe_open

    saved: dict[str, list[int]] = {}
    with _reading(folder):
        state = folder / "trainer_state.json"
        if state.is_file():
            read_json(state, _TRAINER_STATE, "the state of a training", "save it again")
            transformers.TrainerState.load_from_json(str(state))
        names = {"model.safetensors"}
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names = indexed_files(index, "save it again")
        files = [folder / name for name in sorted(names)]
        for file in files:
            with safe_open(file, framework="pt") as opened:
                held = opened.keys()
                saved |= {name: opened.get_slice(name).get_shape() for name in held}
    own = model.state_dict()
    # Of weights that are shared, one is saved.
    loaded = {own[name].data_ptr() for name in saved if name in own}
    missing = [name for name in own if name not in saved and own[name].data_ptr() not in loaded]
    strange = [name for name in saved if name not in own or saved[name] != list(own[name].shape)]
    if missing or strange:
        raise InvalidInputError(
            f"the checkpoint {str(folder)!r} is of another model: {(missing + strange)[0]} does "
            "not fit; start anew in another folder."
        )
    return files


@contextmanager
def _reading(checkpoint: Path) -> Iterator[None]:
    """Say in one sentence that a checkpoint is damaged, whatever that leads to."""
    try:
        yield
    except Exception as error:
        raise InvalidInputError(
            f"the checkpoint {str(checkpoint)!r} cannot be read ({first_line(error)}); remove that "
            "folder to go on from an earlier one."
        ) from error


def _check_checkpoints(
    model: PreTrainedModel, folder: Path, report: Recovery, phases: list[str]
) -> Path | None:
    """Refuse what cannot be gone on from; returns the checkpoint that training goes on from."""
    last = None
    for phase in phases:
        done = phase in report.done
        last = (folder / phase / "final" if done else last_checkpoint(folder / phase)) or last
        if last is not None:
            check_checkpoint(model, last)
        if not done:
            break
    return last


def _read(folder: Path) -> Recovery:
    path = folder / "recovery.json"
    if not path.is_file():
        return Recovery()
    found = read_json(path, _REPORT, "a report of a recovery", "start anew in another folder")
    return Recovery(**{name: found[name] for name in _REPORT})


def _write(folder: Path, report: Recovery) -> None:
    write_atomically(folder / "recovery.json", json.dumps(asdict(report), indent=2) + "\n")
