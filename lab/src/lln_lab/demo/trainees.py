"""Equal encoders with different attentions, trained side by side on masked bytes.

They take turns of a few steps on the same batches, so that the curves can be compared whenever the
training stops. The learning rate follows the clock and is the same for all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_lab.demo.byte_encoder import (
    MASK,
    Attention,
    ByteEncoder,
    EncoderSize,
    trained_attentions,
)
from lln_lab.demo.corpus import Corpus, log_frequency
from lln_lab.demo.state import Clock, Part, State

TRAINED = ("softmax", "lln", "diag", "lln_diag", "lln_keys")
_WARMUP = 10
_FEWEST_TURNS = 2


@dataclass(frozen=True)
class Batch:
    """Tokens int64 ``[B, T]`` with masked bytes, the mask bool ``[B, T]``, the original bytes."""

    tokens: Tensor
    chosen: Tensor
    answers: Tensor


@dataclass(frozen=True)
class Point:
    """Held-out results of all encoders after the same steps, by attention.

    Attributes:
        step: Steps of each encoder.
        loss: Cross entropy in nats per masked byte.
    """

    step: int
    loss: dict[str, float]


@dataclass
class Training(Part):
    """Held-out loss by attention and step.

    Attributes:
        size: Sizes of the encoder.
        batch: Sequences per step.
        held_out: Sequences of the evaluation.
        turn: Steps an encoder takes before the next one's turn.
        evaluations: Approximate number of points of a curve.
        rate: Highest learning rate.
        masked: Share of bytes to predict.
        seed: Seed of weights and batches.
        points: The curves; the first point is the untrained encoder.
        seconds: Seconds of every step.
        unigram: Loss of predicting by byte frequency alone.
        corpus: What was trained on, in words.
        split: How its held-out part was chosen, in words.
    """

    size: EncoderSize = field(default_factory=EncoderSize)
    batch: int = 4
    held_out: int = 24
    turn: int = 3
    evaluations: int = 16
    rate: float = 6e-3
    masked: float = 0.15
    seed: int = 0
    points: list[Point] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in TRAINED})
    unigram: float = float("nan")
    corpus: str = ""
    split: str = ""

    @property
    def has_results(self) -> bool:
        """Whether any step was evaluated."""
        return len(self.points) > 1

    def seconds_per_step(self, name: str) -> float | None:
        """Median seconds of a step."""
        return median(self.seconds[name]) if self.seconds[name] else None

    def ranking(self) -> list[str]:
        """The attentions by their last loss, lowest first."""
        return sorted(TRAINED, key=self.points[-1].loss.__getitem__)

    def measure(self, corpus: Corpus, clock: Clock) -> Iterator[float]:
        """Train until the time is up; yields the share of it that is used."""
        self.state = State.RUNNING
        self.corpus, self.split = corpus.name, corpus.split
        exam = self._evenly(corpus.held_out, torch.Generator().manual_seed(self.seed + 1))
        frequency = log_frequency(corpus.train)
        self.unigram = -frequency[exam.answers].mean().item()
        attentions = trained_attentions(self.size.block_size)
        trainees = {name: _Trainee(self, attentions[name], frequency) for name in TRAINED}
        self.points.append(_evaluate(trainees, exam, 0))
        generator = torch.Generator().manual_seed(self.seed)
        done = turns = 0
        while clock.fraction < 1 or turns < _FEWEST_TURNS:
            fraction = clock.fraction
            batches = [self._sample(corpus.train, generator) for _ in range(self.turn)]
            for name, trainee in trainees.items():
                for index, batch in enumerate(batches):
                    rate = self.rate * _schedule(done + index, fraction)
                    self.seconds[name].append(trainee.learn(batch, rate))
            done, turns = done + self.turn, turns + 1
            if clock.fraction >= len(self.points) / self.evaluations:
                self.points.append(_evaluate(trainees, exam, done))
            yield fraction
        if self.points[-1].step != done:
            self.points.append(_evaluate(trainees, exam, done))
        self.state = State.DONE

    def _sample(self, text: Tensor, generator: torch.Generator) -> Batch:
        start = torch.randint(len(text) - self.size.length, (self.batch,), generator=generator)
        return self._mask(text, start, generator)

    def _evenly(self, text: Tensor, generator: torch.Generator) -> Batch:
        start = torch.linspace(0, len(text) - self.size.length, self.held_out).long()
        return self._mask(text, start, generator)

    def _mask(self, text: Tensor, start: Tensor, generator: torch.Generator) -> Batch:
        tokens = text[start[:, None] + torch.arange(self.size.length)].long()
        chosen = torch.rand(tokens.shape, generator=generator) < self.masked
        return Batch(tokens.masked_fill(chosen, MASK), chosen, tokens[chosen])

    def as_json(self) -> dict[str, object]:
        """Curves and seconds, by attention."""
        return {
            "state": self.state.value,
            "corpus": self.corpus,
            "held_out": self.split,
            "seed": self.seed,
            "layers": self.size.layers,
            "width": self.size.width,
            "heads": self.size.heads,
            "length": self.size.length,
            "block_size": self.size.block_size,
            "batch": self.batch,
            "steps": [point.step for point in self.points],
            "unigram_loss": self.unigram,
            "held_out_loss": {name: [p.loss[name] for p in self.points] for name in TRAINED},
            "seconds_per_step": {name: self.seconds_per_step(name) for name in TRAINED},
        }


class _Trainee:
    """An encoder and its optimiser."""

    def __init__(self, training: Training, attention: Attention, log_frequency: Tensor) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(training.seed)
            self.encoder = ByteEncoder(training.size, attention, log_frequency)
        self.optimiser = torch.optim.AdamW(
            self.encoder.parameters(), lr=training.rate, betas=(0.9, 0.98), fused=True
        )

    def learn(self, batch: Batch, rate: float) -> float:
        """One step; returns its seconds."""
        start = time.perf_counter()
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        loss = F.cross_entropy(self.encoder(batch.tokens, batch.chosen), batch.answers)
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        return time.perf_counter() - start

    @torch.no_grad()
    def sit(self, exam: Batch) -> float:
        """Loss on the held-out text."""
        return F.cross_entropy(self.encoder(exam.tokens, exam.chosen), exam.answers).item()


def _evaluate(trainees: dict[str, _Trainee], exam: Batch, step: int) -> Point:
    return Point(step, {name: trainee.sit(exam) for name, trainee in trainees.items()})


def _schedule(step: int, fraction: float) -> float:
    """Warm-up by steps, then constant, then down to a twentieth in the second half of the time."""
    return min(1.0, (step + 1) / _WARMUP) * max(0.05, min(1.0, 2 * (1 - fraction)))
