"""The loss of recovery training: how far a converted model is from its softmax original."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lln.checks.names import check_choice
from lln.errors import InvalidInputError, UnsupportedModelError
from lln.integrations.attached import AttachedHeads
from lln.integrations.conversion_report import relative_change
from lln.integrations.transformers import find_module
from lln_lab.conversion.output_quality import mask_of, mean_hidden

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OutputLoss = Callable[[Any, Any, dict[str, Tensor]], Tensor]

LOSSES = ("auto", "hidden", "logits", "embedding")


class RecoveryLoss(nn.Module):
    """Inputs in, loss out, so that ``Trainer`` and DistributedDataParallel see one module.

    Args:
        student: The converted model; only this is trained and saved.
        teacher: The original (see `lln_lab.recovery.recover.softmax_teacher`).
        names: Attention modules, in the base model.
        phase: ``"layers"`` or ``"output"``.
        end_loss: As in `lln_lab.recovery.recover.recover`.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: PreTrainedModel,
        names: list[str],
        phase: str,
        end_loss: str | OutputLoss,
    ) -> None:
        """Choose what learns: attention modules in the first phase, everything in the second."""
        super().__init__()
        self.student, self.names, self.phase, self.end_loss = student, names, phase, end_loss
        # In a list: the teacher is neither trained nor saved.
        self._teacher = [teacher]
        student.requires_grad_(phase == "output")
        if phase == "layers":
            for module in modules_of(student, names):
                module.requires_grad_(True)

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """The mean loss over the valid tokens of a batch."""
        teacher = follow(self._teacher[0], self.student)
        quiet(self.student, statistics=self.training)
        inputs = ready(self.student, inputs)
        if self.phase == "layers":
            losses = [
                relative_error(found, expected, mask_of(inputs, expected))
                for found, expected in layer_outputs(self.student, teacher, self.names, inputs)
            ]
            return {"loss": torch.stack(losses).mean()}
        with torch.no_grad():
            expected = teacher(**inputs)
        return {"loss": self._output_loss(self.student(**inputs), expected, inputs)}

    def _output_loss(self, found: Any, expected: Any, inputs: dict[str, Tensor]) -> Tensor:
        if not isinstance(self.end_loss, str):
            return self.end_loss(found, expected, inputs)
        kind = self.end_loss
        if kind == "auto":
            kind = "logits" if "logits" in expected else "hidden"
        if kind == "logits":
            return divergence(found.logits, expected.logits, mask_of(inputs, expected.logits))
        found, expected = found.last_hidden_state, expected.last_hidden_state
        mask = mask_of(inputs, expected)
        loss = relative_error(found, expected, mask)
        if kind == "embedding":
            pooled = mean_hidden(found, mask), mean_hidden(expected, mask)
            loss = loss + (1 - F.cosine_similarity(*pooled, dim=-1)).mean()
        return loss


def check_end_loss(
    end_loss: str | OutputLoss, model: PreTrainedModel, inputs: dict[str, Tensor]
) -> None:
    """Refuse an unknown loss, and one that a model of this kind has no output for.

    Args:
        end_loss: As in `lln_lab.recovery.recover.recover`.
        model: Runs once.
        inputs: For it.
    """
    if not isinstance(end_loss, str):
        return
    check_choice("end_loss", end_loss, LOSSES)
    if end_loss == "auto":
        return
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    with torch.no_grad():
        output = model(**ready(model, inputs))
    if (end_loss == "logits") != ("logits" in output):
        raise InvalidInputError(
            f"end_loss {end_loss!r} does not fit {type(model).__name__}, which gives "
            f"{', '.join(output)}; choose end_loss 'auto'."
        )


def layer_outputs(
    student: PreTrainedModel, teacher: PreTrainedModel, names: list[str], inputs: dict[str, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """What every attention module of student and teacher makes of the teacher's inputs."""
    with seen(modules_of(teacher, names)) as calls, torch.no_grad():
        teacher(**inputs)
    for module, call in zip(modules_of(student, names), calls, strict=True):
        if call is None:
            raise UnsupportedModelError(f"{type(module).__name__} did not run in the original.")
        arguments, keywords, expected = call
        yield first(module(*arguments, **keywords)), first(expected)


def measure(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    names: list[str],
    inputs: dict[str, Tensor],
) -> tuple[float, list[float]]:
    """‖difference‖ / ‖original‖ of the model's output, and of every attention module's."""
    training = student.training
    teacher = follow(teacher, student)
    device = student.device
    inputs = ready(student, {name: tensor.to(device) for name, tensor in inputs.items()})
    student.eval()
    try:
        with torch.no_grad():
            layers = [
                relative_change(found, expected, mask_of(inputs, expected))
                for found, expected in layer_outputs(student, teacher, names, inputs)
            ]
            expected = first(teacher(**inputs))
            found = first(student(**inputs))
            return relative_change(found, expected, mask_of(inputs, expected)), layers
    finally:
        student.train(training)


def follow(teacher: PreTrainedModel, student: PreTrainedModel) -> PreTrainedModel:
    """The teacher, on the device that the student was moved to."""
    nn.Module.to(teacher, student.device)
    return teacher


def modules_of(model: PreTrainedModel, names: list[str]) -> list[nn.Module]:
    """The attention modules of those names."""
    found = [find_module(model, name) for name in names]
    return [module for module in found if module is not None]


@contextmanager
def seen(modules: list[nn.Module]) -> Iterator[list[Any]]:
    """What each of the modules was called with, and what it returned."""
    calls: list[Any] = [None] * len(modules)
    handles = []
    for index, module in enumerate(modules):

        def keep(module: Any, args: Any, kwargs: Any, output: Any, index: int = index) -> None:
            calls[index] = (args, kwargs, output)

        handles.append(module.register_forward_hook(keep, with_kwargs=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def quiet(model: nn.Module, *, statistics: bool) -> None:
    """Switch dropout off, because its noise is not in the target; running statistics go on."""
    model.eval()
    for module in model.modules():
        if isinstance(module, AttachedHeads):
            module.train(statistics)


def ready(model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Inputs without labels, and without a cache where the model would make one."""
    clean: dict[str, Any] = {name: tensor for name, tensor in inputs.items() if name != "labels"}
    if getattr(model.config, "use_cache", None):
        clean["use_cache"] = False
    return clean


def relative_error(found: Tensor, expected: Tensor, mask: Tensor | None) -> Tensor:
    """Squared error over the valid tokens, relative to the size of what is expected."""
    found, expected = found.float(), expected.float()
    if mask is not None:
        found, expected = found[mask], expected[mask]
    return (found - expected).square().mean() / expected.square().mean().clamp_min(1e-12)


def divergence(found: Tensor, expected: Tensor, mask: Tensor | None) -> Tensor:
    """Kullback–Leibler divergence of the predicted distributions, a mean over predictions."""
    if mask is not None:
        found, expected = found[mask], expected[mask]
    found, expected = (side.float().log_softmax(-1) for side in (found, expected))
    return F.kl_div(
        found.flatten(0, -2), expected.flatten(0, -2), reduction="batchmean", log_target=True
    )


def first(outputs: Any) -> Tensor:
    """The first tensor of a module's output."""
    return outputs if isinstance(outputs, Tensor) else outputs[0]
