"""Training whose steps are captured once and replayed on a GPU.

A step of a small host is hundreds of kernels that take less time than their calls. A CUDA graph
replays all of them by one call, so that a dozen small trainings share one GPU. Elsewhere, and if
asked for, the same step is called as it is written.

A stream makes batches of one shape from the number of the step alone, so a training that was
stopped goes on with the batches that would have come.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lln.files import replacing

Batch = dict[str, Tensor]
# Steps that are called as written before the next is captured: libraries set themselves up.
WRITTEN = 3


class Stream(Protocol):
    """Where batches come from."""

    def batch(self, step: int) -> Batch:
        """Arguments of the host, on its device."""
        ...


@dataclass(frozen=True)
class Phase:
    """A part of a training with its own rise and fall of the learning rate.

    Attributes:
        steps: Updates.
        rate: Highest learning rate.
        warm_up: Share of the steps over which it rises; then it falls in a line.
    """

    steps: int
    rate: float
    warm_up: float = 0.06

    def rate_at(self, step: int) -> float:
        """Learning rate of a step of this phase."""
        rise = max(self.warm_up * self.steps, 1)
        return self.rate * min((step + 1) / rise, (self.steps - step) / max(self.steps - rise, 1))


@dataclass(frozen=True)
class Course:
    """How a host is trained.

    Attributes:
        phases: One after the other.
        batch: Examples per update.
        decay: Weight decay of matrices; biases, norms and embeddings of one axis have none.
        betas: Of AdamW.
        clip: Largest norm of the gradient.
        points: Points of the curve, each with a look at the valid part.
    """

    phases: tuple[Phase, ...]
    batch: int
    decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0
    points: int = 25

    @property
    def steps(self) -> int:
        """Of all phases."""
        return sum(phase.steps for phase in self.phases)

    def rate_at(self, step: int) -> float:
        """Learning rate of a step."""
        for phase in self.phases:
            if step < phase.steps:
                return phase.rate_at(step)
            step -= phase.steps
        raise ValueError(f"the course has {self.steps} steps")


class Steps:
    """Calls the training step of a host, on a GPU by replaying it.

    Args:
        model: Returns its loss under ``"loss"``.
        course: See `Course`.
        capture: Whether to replay; needs a GPU.
    """

    def __init__(self, model: nn.Module, course: Course, capture: bool) -> None:
        """Build the optimizer; nothing is captured yet."""
        self.model, self.course, self.capture = model, course, capture
        self.device = next(model.parameters()).device
        on_gpu = self.device.type == "cuda"
        self.rate = torch.zeros((), device=self.device)
        wide = [weight for weight in model.parameters() if weight.dim() > 1]
        narrow = [weight for weight in model.parameters() if weight.dim() <= 1]
        groups = [
            {"params": wide, "weight_decay": course.decay},
            {"params": narrow, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.rate, betas=course.betas, fused=on_gpu, capturable=on_gpu
        )
        self.total = torch.zeros((), device=self.device)
        self.graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Batch]] = {}
        self.called: dict[Any, int] = {}

    def __call__(self, batch: Batch, rate: float) -> None:
        """One update; `total` grows by its loss."""
        self.rate.fill_(rate)
        if not self.capture:
            self._step(batch)
            return
        kind = tuple((name, side.shape) for name, side in sorted(batch.items()))
        if self.called.setdefault(kind, 0) < WRITTEN:
            self.called[kind] += 1
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                self._step(batch)
            torch.cuda.current_stream().wait_stream(beside)
            return
        if kind not in self.graphs:
            self.graphs[kind] = self._captured(batch)
        graph, inputs = self.graphs[kind]
        for name, side in inputs.items():
            side.copy_(batch[name])
        graph.replay()

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate

    def _captured(self, batch: Batch) -> tuple[torch.cuda.CUDAGraph, Batch]:
        inputs = {name: side.clone() for name, side in batch.items()}
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        # Other threads of the process may ask the driver for memory meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._step(inputs)
        return graph, inputs

    def _step(self, batch: Batch) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with narrow(self.device):
            loss = self.model(**batch)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.course.clip)
        self.optimizer.step()
        self.total += loss.detach()


def narrow(device: torch.device) -> Any:
    """Autocast to bfloat16 on a GPU; a CPU computes as it is."""
    if device.type != "cuda":
        return nullcontext()
    # What is kept for the next use would be kept from one replay to the next.
    return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)


def train_captured(
    model: nn.Module,
    stream: Stream,
    course: Course,
    path: Path,
    *,
    capture: bool,
    look: Callable[[], dict[str, float]],
    tell: Callable[[int, str], object],
    until: float | None = None,
) -> dict[str, Any] | None:
    """Train to the end, or until time is over.

    Args:
        model: A host on its device; trained in place.
        stream: Of batches.
        course: How.
        path: The checkpoint, which is read if it is there and stays; whoever has kept the result
            removes it.
        capture: See `Steps`.
        look: Measures of the valid part.
        tell: Called after every step with its number, and words for the log at points of the curve.
        until: Stop when `time.monotonic` says so.

    Returns:
        Curve and seconds; None if time was over first.
    """
    steps, curve, spent, first = Steps(model, course, capture), [], 0.0, 0
    if path.exists():
        device = next(model.parameters()).device
        kept = torch.load(path, map_location=device, weights_only=True)
        steps.load(kept)
        curve, spent, first = kept["curve"], kept["seconds"], kept["step"]
    begun = time.monotonic() - spent
    every = max(course.steps // course.points, 1)

    def keep(step: int) -> None:
        seconds = time.monotonic() - begun
        with replacing(path) as file:
            torch.save(steps.state() | {"curve": curve, "seconds": seconds, "step": step}, file)

    since = first
    model.train()
    for step in range(first, course.steps):
        steps(stream.batch(step), course.rate_at(step))
        done, words = step + 1, ""
        if done % every == 0 or done == course.steps:
            loss = float(steps.total) / (done - since)
            steps.total.zero_()
            since = done
            found = look()
            model.train()
            curve.append([done, round(loss, 4), *(round(one, 4) for one in found.values())])
            seen = " ".join(f"{name} {value:.4f}" for name, value in found.items())
            words = f"step {done} loss {loss:.4f} {seen} [{time.monotonic() - begun:.0f} s]"
            keep(done)
        tell(done, words)
        if until is not None and time.monotonic() > until and done < course.steps:
            keep(done)
            tell(done, f"out of time at step {done}")
            return None
    return {"curve": curve, "seconds": round(time.monotonic() - begun, 1), "captured": capture}
