"""Figure 1: temperature, entropy and spectral gap of every layer while a small RoBERTa learns.

The paper's model has a single head per layer, so that a layer is one curve. Ours is smaller and
reads bytes: minutes on a CPU instead of days. It is measured on the same held-out text every time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lln.checks.reading import first_line
from lln.errors import InvalidInputError
from lln.files import replacing
from lln.instruments import capture
from lln_lab.demo.corpus import Corpus, load_corpus, log_frequency
from lln_lab.figures.setting import Results, Setting
from lln_lab.figures.single_head_model import SingleHeadRoberta, Size, masked
from lln_lab.figures.style import plain_ticks, title
from lln_lab.saved_data import read_saved

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (12.8, 3.6)

_INSTRUMENTS = ("temperature", "entropy", "spectral_gap")
_SHARE = 0.15
# What `Run.save` writes.
_STATE = {
    "identity": dict,
    "done": int,
    "records": [
        {
            "step": int,
            "training_loss": Real,
            "held_out_loss": Real,
            **{name: [Real] for name in _INSTRUMENTS},
        }
    ],
    "losses": [Real],
    "model": dict,
    "optimiser": dict,
}


@dataclass(frozen=True)
class TrainingRecipe:
    """How the model is trained.

    Attributes:
        size: Sizes of the model.
        steps: Updates.
        batch: Sequences per update.
        rate: Highest learning rate.
        warmup: Share of the updates during which the rate rises; then it falls to zero.
        points: Approximate number of measurements during training.
        held_out: Number of sequences to measure on.
        seed: Seed of weights and batches.
    """

    size: Size = field(default_factory=Size)
    steps: int = 3000
    batch: int = 16
    rate: float = 3e-3
    warmup: float = 0.06
    points: int = 60
    held_out: int = 8
    seed: int = 0

    @property
    def measured_steps(self) -> list[int]:
        """The updates after which a measurement is made."""
        every = max(self.steps // self.points, 1)
        return [*range(0, self.steps, every), self.steps]

    def rate_at(self, step: int) -> float:
        """Learning rate of an update."""
        rise = (step + 1) / max(self.warmup * self.steps, 1)
        return self.rate * min(rise, 1.0, 1 - step / self.steps)


QUICK = TrainingRecipe(Size(16, 2, 32), steps=12, batch=4, points=4, held_out=2)


def measure(setting: Setting) -> Results:
    """Train, and measure every layer several times during the training.

    The state so far is saved in ``setting.work``; an interrupted run resumes from there.
    """
    corpus = load_corpus(setting.data)
    run = Run(QUICK if setting.quick else TrainingRecipe(), corpus, setting.device)
    work = setting.work
    if work is not None and work.exists():
        run.resume(work)
    for share in run.train(work):
        setting.progress(share)
    if work is not None:
        work.unlink(missing_ok=True)
    return run.results()


class Run:
    """A training run, which can be saved and resumed."""

    def __init__(self, recipe: TrainingRecipe, corpus: Corpus, device: str = "cpu") -> None:
        """Start with new weights and no measurements."""
        self.recipe, self.corpus, self.device = recipe, corpus, device
        frequency = log_frequency(corpus.train)
        self.unigram_loss = -frequency[corpus.held_out.long()].mean().item()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            self.model = SingleHeadRoberta(recipe.size, frequency).to(device)
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01
        )
        self.done = 0
        self.records: list[dict[str, Any]] = []
        self._losses: list[float] = []

    def train(self, work: Path | None = None) -> Iterator[float]:
        """Train to the end; yields the share that is done, and saves at every measurement."""
        due = set(self.recipe.measured_steps)
        while True:
            if self.done in due and (not self.records or self.records[-1]["step"] < self.done):
                self.records.append(self._measure())
                if work is not None:
                    self.save(work)
            if self.done >= self.recipe.steps:
                return
            self._update()
            self.done += 1
            yield self.done / self.recipe.steps

    def results(self) -> Results:
        """The curves, and the settings they were made with."""
        return {
            "corpus": self.corpus.name,
            "held_out_text": self.corpus.split,
            **asdict(self.recipe),
            "unigram_loss": self.unigram_loss,
            "step": [record["step"] for record in self.records],
            "training_loss": [record["training_loss"] for record in self.records],
            "held_out_loss": [record["held_out_loss"] for record in self.records],
            # By layer, then by step.
            **{
                name: [
                    [record[name][layer] for record in self.records]
                    for layer in range(self.recipe.size.layers)
                ]
                for name in _INSTRUMENTS
            },
        }

    def save(self, path: Path) -> None:
        """Save everything needed to resume, in one step."""
        state = {
            "identity": self._identity(),
            "done": self.done,
            "records": self.records,
            "losses": self._losses,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
        }
        with replacing(path) as file:
            torch.save(state, file)

    def resume(self, path: Path) -> None:
        """Continue from a file that `save` wrote.

        Raises:
            InvalidInputError: If the file is broken, or from another training run.
        """
        what, fix = "a training under way", "remove it to start over"
        state = read_saved(path, _STATE, what, fix, self.device)
        if state["identity"] != self._identity():
            raise InvalidInputError(
                f"{str(path)!r} is of a training with other text or sizes; remove it to start "
                "over, or name another file with --work."
            )
        self.done, self.records, self._losses = state["done"], state["records"], state["losses"]
        try:
            self.model.load_state_dict(state["model"])
            self.optimiser.load_state_dict(state["optimiser"])
        # What does not fit shows as whatever it leads to.
        except Exception as error:
            raise InvalidInputError(
                f"{str(path)!r} is not {what} ({first_line(error)}); {fix}."
            ) from error

    def _identity(self) -> dict[str, Any]:
        return {
            **asdict(self.recipe),
            "text": zlib.crc32(bytes(self.corpus.train[:1_000_000].numpy())),
            "bytes": len(self.corpus.train),
        }

    def _update(self) -> None:
        for group in self.optimiser.param_groups:
            group["lr"] = self.recipe.rate_at(self.done)
        # One seed per update, so that a resumed training sees the same batches.
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.done)
        start = torch.randint(
            len(self.corpus.train) - self.recipe.size.length,
            (self.recipe.batch,),
            generator=generator,
        )
        loss = self._loss(self.corpus.train, start, generator)
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self._losses.append(loss.item())

    def _measure(self) -> dict[str, Any]:
        size, text = self.recipe.size, self.corpus.held_out
        start = torch.linspace(0, len(text) - size.length, self.recipe.held_out).long()
        generator = torch.Generator().manual_seed(self.recipe.seed)
        with torch.no_grad(), capture(self.model, instruments=_INSTRUMENTS) as seen:
            loss = self._loss(text, start, generator).item()
        recent, self._losses = self._losses, []
        record: dict[str, Any] = {
            "step": self.done,
            "training_loss": sum(recent) / len(recent) if recent else loss,
            "held_out_loss": loss,
        }
        for name in _INSTRUMENTS:
            record[name] = [heads[0] for heads in seen.medians(name).values()]
        return record

    def _loss(self, text: Tensor, start: Tensor, generator: torch.Generator) -> Tensor:
        """Cross entropy in nats per chosen byte."""
        tokens = text[start[:, None] + torch.arange(self.recipe.size.length)].long()
        shown, chosen = masked(tokens, _SHARE, generator)
        logits = self.model(shown.to(self.device), chosen.to(self.device))
        return F.cross_entropy(logits, tokens[chosen].to(self.device))


def draw(figure: Figure, found: Results) -> None:
    """The paper's three panels, and the loss."""
    from matplotlib import colormaps

    panels = figure.subplots(1, 4)
    layers = len(found["entropy"])
    shades = [colormaps["viridis"](index / max(layers - 1, 1) * 0.9) for index in range(layers)]
    dashes = ("-", "--", "-.")
    labels = {
        "temperature": ("(a)", "temperature"),
        "entropy": ("(b)", "entropy, bits"),
        "spectral_gap": ("(c)", "spectral gap"),
    }
    for axes, (name, (letter, label)) in zip(panels, labels.items(), strict=False):
        for layer, curve in enumerate(found[name]):
            look = {"color": shades[layer], "linestyle": dashes[layer % len(dashes)]}
            axes.plot(found["step"], curve, label=f"layer {layer + 1}", **look)
        title(axes, f"{letter} {label}")
        axes.set_xlabel("training step")
    panels[0].set_yscale("log")
    plain_ticks(panels[0])
    size = found["size"]
    panels[1].axhline(torch.tensor(size["length"]).log2().item(), color="#999999", linewidth=0.8)
    panels[2].set_ylim(-0.02, 1.02)
    panels[3].plot(found["step"][1:], found["training_loss"][1:], color="#999999", label="training")
    panels[3].plot(found["step"], found["held_out_loss"], color="#000000", label="held out")
    look = {"color": "#D55E00", "linestyle": ":", "label": "byte frequencies alone"}
    panels[3].axhline(found["unigram_loss"], **look)
    title(panels[3], "(d) loss, nats per byte")
    panels[3].set_xlabel("training step")
    panels[3].legend()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=layers)
