"""How long a forward pass takes: softmax attention against LLN attention, by sequence length."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from lln.functional.dense import lln_attention, lln_diag_attention
from lln_lab.bench.crossover import Crossover, crossover
from lln_lab.bench.spread import Timed, timed
from lln_lab.demo.state import Clock, Part, State

TIMED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "softmax": F.scaled_dot_product_attention,
    "lln": lln_attention,
    "lln_diag": lln_diag_attention,
}
_FEWEST_RUNS = 3


@dataclass
class Speed(Part):
    """Seconds per call, by attention and length, one value per run.

    Attributes:
        lengths: Sequence lengths N, each twice the one before.
        heads: H.
        width: D.
        most_runs: Runs per length at most.
        runs: Seconds of every run, by attention and length.
        dropped: Where a series ended because the next length would have cost too much time.
    """

    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)
    heads: int = 12
    width: int = 64
    most_runs: int = 25
    runs: dict[str, dict[int, list[float]]] = field(
        default_factory=lambda: {name: {} for name in TIMED}
    )
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def has_results(self) -> bool:
        """Whether any length is measured."""
        return bool(self.measured())

    def measured(self) -> list[int]:
        """Lengths with a time for at least one attention."""
        return [n for n in self.lengths if any(self.runs[name].get(n) for name in TIMED)]

    def times(self, name: str) -> dict[int, float]:
        """Median seconds per call, by length."""
        return {n: median(runs) for n, runs in self.runs[name].items() if runs}

    def timed(self, name: str) -> dict[int, Timed]:
        """Median and quartiles of the seconds per call, by length."""
        return {n: timed(runs) for n, runs in self.runs[name].items() if runs}

    def crossover(self, name: str) -> Crossover | None:
        """From which length on an attention is faster than softmax attention."""
        return crossover(self.timed("softmax"), self.timed(name))

    def spread(self, name: str) -> dict[int, tuple[float, float]]:
        """Fastest and slowest run in seconds, by length."""
        return {n: (min(runs), max(runs)) for n, runs in self.runs[name].items() if runs}

    def unsteady(self, name: str) -> list[int]:
        """Lengths that took less time than a shorter one, which only other programs can cause."""
        times = self.times(name)
        return [n for n in times if any(times[m] > times[n] for m in times if m < n)]

    def every_unsteady(self) -> dict[str, list[int]]:
        """The same by attention, without attentions that have no such lengths."""
        return {name: lengths for name in TIMED if (lengths := self.unsteady(name))}

    def ratio(self, name: str, length: int) -> str:
        """Time of softmax attention over that of an attention, as tables show it."""
        slow, fast = self.times("softmax").get(length), self.times(name).get(length)
        return "–" if slow is None or fast is None else f"{slow / fast:.2f}"

    def run_counts(self) -> str:
        """Fewest and most runs that a time is based on."""
        counts = sorted({len(runs) for name in TIMED for runs in self.runs[name].values()})
        return f"{counts[0]} to {counts[-1]}" if counts[0] != counts[-1] else f"{counts[0]}"

    def has_noise(self) -> bool:
        """Whether any time is noisy."""
        return any(time.is_noisy for name in TIMED for time in self.timed(name).values())

    def measure(self, clock: Clock) -> Iterator[float]:
        """Time every attention in turn at every length; yields the share that is done."""
        self.state = State.RUNNING
        generator = torch.Generator().manual_seed(0)
        for index, length in enumerate(self.lengths):
            shape = (3, 1, self.heads, length, self.width)
            inputs = tuple(torch.randn(shape, generator=generator))
            names = self._affordable(length, clock)
            # Longer sequences need more time: a length's share of the remaining time grows with it.
            share = Clock(max(0.0, clock.left) * length / sum(self.lengths[index:]))
            # One round that does not count: the first call also allocates memory, starts threads.
            for name in names:
                _seconds(TIMED[name], inputs)
            for round_ in range(self.most_runs):
                if round_ >= _FEWEST_RUNS and share.left < share.spent / round_:
                    break
                for name in names:
                    self.runs[name].setdefault(length, []).append(_seconds(TIMED[name], inputs))
                yield (index + (round_ + 1) / self.most_runs) / len(self.lengths)
        self.state = State.DONE

    def _affordable(self, length: int, clock: Clock) -> list[str]:
        """The attentions for which the fewest runs still fit; the slowest is dropped first."""
        expected: dict[str, float] = {}
        for name in TIMED:
            times, growth = self.times(name), 4 if name == "softmax" else 2
            if name not in self.dropped:
                expected[name] = growth * times[max(times)] if times else 0.0
        while sum(expected.values()) * (_FEWEST_RUNS + 1) > max(0.0, clock.left):
            dearest = max(expected, key=expected.__getitem__)
            self.dropped[dearest] = length
            del expected[dearest]
        return list(expected)

    def as_json(self) -> dict[str, object]:
        """Median milliseconds, by attention and length."""
        found = {name: self.crossover(name) for name in TIMED if name != "softmax"}
        return {
            "state": self.state.value,
            "batch": 1,
            "heads": self.heads,
            "head_width": self.width,
            "dtype": "float32",
            "milliseconds": {
                name: {str(n): 1e3 * seconds for n, seconds in self.times(name).items()}
                for name in TIMED
            },
            "every_run": {
                name: {str(n): [round(1e3 * s, 3) for s in r] for n, r in self.runs[name].items()}
                for name in TIMED
            },
            "crossover": {name: each and each.place for name, each in found.items()},
            "verdict": {name: each and each.verdict("faster") for name, each in found.items()},
        }


def _seconds(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: tuple[Tensor, ...]
) -> float:
    query, key, value = inputs
    with torch.no_grad():
        start = time.perf_counter()
        attention(query, key, value)
        return time.perf_counter() - start
