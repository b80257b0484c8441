"""What a conversion to a target found: quality against time, and the choice, as tables and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lln.files import write_atomically
from lln_lab.conversion.attention_cost import MOST_SECONDS

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class LayerChoice:
    """What one layer got, and why.

    Attributes:
        name: In the base model.
        keys: Exact keys outside its block; None = it stays softmax.
        errors: By keys: ‖LLN − softmax‖ / ‖softmax‖ of its output on the softmax model's own
            activations; empty if it was left out of the search.
        estimated: By tokens: operations of its attention, softmax's = 1.
        measured: By tokens: milliseconds of its attention for one sequence; None = not measured.
    """

    name: str
    keys: int | None
    errors: dict[int, float]
    estimated: dict[int, float]
    measured: dict[int, float | None]


@dataclass(frozen=True)
class ParetoRow:
    """The model with one choice of keys.

    Attributes:
        name: ``"softmax"``, ``"K = 64"`` or ``"choice"``.
        quality: On the calibration batch, see `lln_lab.conversion.output_quality.quality`.
        holdout: On held-out data, if there is any.
        estimated: By tokens: operations of all attention, softmax's = 1.
        measured: By tokens: milliseconds of all attention for one sequence; None = not measured.
    """

    name: str
    quality: float
    holdout: float | None
    estimated: dict[int, float]
    measured: dict[int, float | None]


@dataclass(frozen=True)
class TargetReport:
    """What a conversion to a target found.

    Attributes:
        target: The quality that was asked for.
        compared: What the quality is a mean cosine of.
        tokens: Length of the calibration batch.
        runs: How often the model ran on it.
        device: Where times were measured.
        layers: What every layer got.
        rows: Quality against time; the last row is the choice.
        all_exact: Whether no layer could be anything but exact, the sequences being so short.
    """

    target: float
    compared: str
    tokens: int
    runs: int
    device: str
    layers: list[LayerChoice] = field(default_factory=list)
    rows: list[ParetoRow] = field(default_factory=list)
    all_exact: bool = False

    @property
    def choice(self) -> dict[str, int | None]:
        """Keys of every layer by its name; None = softmax."""
        return {layer.name: layer.keys for layer in self.layers}

    @property
    def quality(self) -> float:
        """Of the choice, on the calibration batch."""
        return self.rows[-1].quality

    @property
    def holdout(self) -> float | None:
        """Of the choice, on held-out data."""
        return self.rows[-1].holdout

    def notes(self) -> list[str]:
        """What should not be overlooked, in sentences."""
        found: list[str] = []
        if self.holdout is not None and self.holdout < self.target:
            found.append(
                f"the target {self.target:g} is missed on held-out data ({self.holdout:.4f}): "
                "calibrate on more data, or set a higher target."
            )
        if all(layer.keys is None for layer in self.layers):
            found.append(
                f"no layer could be converted within the target {self.target:g}, all stay softmax: "
                "set a lower target and train afterwards."
            )
        elif self.all_exact:
            found.append(
                f"the calibration batch has only {self.tokens} tokens per sample, so that every "
                "key is exact: calibrate at the length the model will read."
            )
        return found

    def write(self, path: str | Path) -> None:
        """Write everything as JSON."""
        content = asdict(self) | {"choice": self.choice, "notes": self.notes()}
        write_atomically(Path(path), json.dumps(content, indent=2) + "\n")

    def show(self, console: Console) -> None:
        """Print the table of quality against time, and what it means."""
        from rich.table import Table

        lengths = list(self.rows[-1].estimated)
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("keys", no_wrap=True)
        table.add_column("quality", justify="right")
        has_holdout = self.holdout is not None
        if has_holdout:
            table.add_column("held out", justify="right")
        for tokens in lengths:
            table.add_column(f"est. {tokens:,}", justify="right")
        for tokens in lengths:
            table.add_column(f"ms {tokens:,}", justify="right")
        for row in self.rows:
            table.add_row(
                row.name,
                f"{row.quality:.4f}",
                *([f"{row.holdout:.4f}"] if has_holdout else []),
                *(f"{row.estimated[tokens]:.2f}" for tokens in lengths),
                *(_milliseconds(row.measured[tokens]) for tokens in lengths),
            )
        console.print(table)
        kept = sum(layer.keys is None for layer in self.layers)
        numbers = ", ".join("softmax" if k is None else str(k) for k in self.choice.values())
        unseen = f", {self.holdout:.4f} on held-out data" if has_holdout else ""
        empty = any(cell is None for row in self.rows for cell in row.measured.values())
        skipped = (
            f"; an empty cell would have taken more than {MOST_SECONDS:g} s per layer"
            if empty
            else ""
        )
        console.print(
            f"Keys by layer: {numbers}; {kept} of {len(self.layers)} stay softmax. Mean cosine of "
            f"the {self.compared} with the original's: {self.quality:.4f} on the batch{unseen}, "
            f"target {self.target:g}, found in {self.runs} runs at {self.tokens:,} tokens. "
            "est.: operations of all attention, softmax's = 1; ms: measured, all layers, one "
            f"sequence, {self.device}{skipped}.",
            highlight=False,
        )


def _milliseconds(found: float | None) -> str:
    return "" if found is None else f"{found:.3g}" if found < 100 else f"{found:,.0f}"
