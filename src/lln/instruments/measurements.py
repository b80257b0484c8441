"""What a capture found: one measurement per call, with views as records, table and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lln.checks.names import did_you_mean
from lln.checks.printing import brief, written
from lln.errors import InvalidInputError
from lln.files import write_atomically
from lln.instruments.head_maps import draw_maps, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class HeadRecord:
    """One head of one sample of one call.

    Attributes:
        layer: Path of the module in the model.
        head: Query head.
        call: How many calls of this layer came before.
        sample: Row of the batch, or packed sequence.
        kind: ``"softmax"``, ``"lln"``, ``"diag"``, ``"lln_diag"``, ``"window"`` or ``"lln_keys"``.
        values: By instrument; NaN where it has no value.
    """

    layer: str
    head: int
    call: int
    sample: int
    kind: str
    values: dict[str, float]


@dataclass(frozen=True)
class Measurement:
    """One attention call.

    Attributes:
        layer: Path of the module in the model.
        call: How many calls of this layer came before.
        kind: ``"softmax"``, ``"lln"``, ``"diag"``, ``"lln_diag"``, ``"window"`` or ``"lln_keys"``.
        queries: T, or the number of packed tokens.
        keys: S, likewise.
        first_head: Number of the first head, where heads are divided between kinds.
        values: ``[B, H]`` by instrument, float64 on the CPU.
        problem: One sentence on what could not be measured; empty if all was.
    """

    layer: str
    call: int
    kind: str
    queries: int
    keys: int
    first_head: int = 0
    values: dict[str, Tensor] = field(default_factory=dict)
    problem: str = ""

    def __repr__(self) -> str:
        """By shapes."""
        return brief(self, vars(self))

    def records(self) -> Iterator[HeadRecord]:
        """Sample by sample, head by head."""
        lists = {name: value.tolist() for name, value in self.values.items()}
        if not lists:
            return
        batch, heads = next(iter(self.values.values())).shape
        for sample in range(batch):
            for head in range(heads):
                values = {name: rows[sample][head] for name, rows in lists.items()}
                where = (self.layer, self.first_head + head, self.call, sample)
                yield HeadRecord(*where, self.kind, values)


@dataclass
class Measurements:
    """Everything a capture found, in the order of the calls; a `capture` is one of these.

    Attributes:
        calls: One `Measurement` per attention call.
    """

    calls: list[Measurement] = field(default_factory=list)

    def __repr__(self) -> str:
        """How much there is; `table` shows it."""
        return f"{type(self).__name__}(calls={len(self.calls)}, layers={len(self.layers)})"

    @property
    def records(self) -> list[HeadRecord]:
        """One per call, sample and head."""
        return [record for call in self.calls for record in call.records()]

    @property
    def layers(self) -> list[str]:
        """Layers in the order in which they were first called.

        If each head of a layer has two attentions, joined afterwards, the layer counts as two:
        ``"path (lln)"`` and ``"path (diag)"``.
        """
        return list(dict.fromkeys(self._labels()))

    def _labels(self) -> list[str]:
        """The entry of `layers` that each call belongs to."""
        kinds: dict[tuple[str, int], set[str]] = {}
        for call in self.calls:
            kinds.setdefault((call.layer, call.first_head), set()).add(call.kind)
        return [
            call.layer
            if len(kinds[call.layer, call.first_head]) == 1
            else f"{call.layer} ({call.kind})".lstrip()
            for call in self.calls
        ]

    @property
    def problems(self) -> dict[str, str]:
        """What could not be measured, by layer: the first such sentence."""
        return {call.layer: call.problem for call in reversed(self.calls) if call.problem}

    def medians(self, instrument: str) -> dict[str, dict[int, float]]:
        """Median over calls and samples, by layer and head; NaN where nothing was measured.

        Args:
            instrument: A name out of ``records[0].values``.

        Raises:
            InvalidInputError: If it was not measured.
        """
        known = sorted({name for call in self.calls for name in call.values})
        if instrument not in known:
            raise InvalidInputError(
                f"{instrument!r} was not measured{did_you_mean(instrument, known)}; there are "
                f"{', '.join(known) or 'no values'}."
            )
        found: dict[str, dict[int, list[float]]] = {layer: {} for layer in self.layers}
        for label, call in zip(self._labels(), self.calls, strict=True):
            for record in call.records():
                if instrument in record.values:
                    heads = found[label].setdefault(record.head, [])
                    heads.append(record.values[instrument])
        return {
            layer: {head: _median(values) for head, values in sorted(heads.items())}
            for layer, heads in found.items()
        }

    def table(self) -> str:
        """A text table, one line per layer and head: medians over calls and samples."""
        columns = self._columns()
        rows = [["layer", "head", *columns]]
        for layer in self.layers:
            heads = sorted({head for column in columns.values() for head in column[layer]})
            for head in heads:
                values = (column[layer].get(head, math.nan) for column in columns.values())
                rows.append([layer, str(head), *(written(value, ".4g") for value in values)])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [_line(row, widths) for row in rows]
        lines += [f"{layer}: {problem}" for layer, problem in self.problems.items()]
        return "\n".join(lines)

    def plot(self, path: str | Path | None = None) -> Figure:
        """A picture of the same medians: a map per instrument, with layers down and heads across.

        Args:
            path: Where to save it too: a PNG, or what its suffix says.

        Returns:
            The figure, which a notebook shows.

        Raises:
            BackendUnavailableError: If matplotlib is not installed.
            InvalidInputError: If nothing was measured, or ``path`` is no picture.
        """
        columns, rows = self._columns(), {}
        if not columns:
            raise InvalidInputError("there is nothing to draw, because nothing was measured.")
        for name, layers in columns.items():
            last = max((head for heads in layers.values() for head in heads), default=0)
            rows[name] = [
                [layers[layer].get(head, math.nan) for head in range(last + 1)]
                for layer in self.layers
            ]
        figure = draw_maps(rows, self.layers)
        if path is not None:
            save_figure(figure, Path(path))
        return figure

    def _columns(self) -> dict[str, dict[str, dict[int, float]]]:
        """The medians of all that was measured."""
        names = dict.fromkeys(name for call in self.calls for name in call.values)
        return {name: self.medians(name) for name in names}

    def to_json(self, path: str | Path | None = None) -> str:
        """All records and problems as JSON; also written to ``path``, if given."""
        content = {
            "problems": self.problems,
            "records": [
                {name: part for name, part in vars(record).items() if name != "values"}
                | record.values
                for record in self.records
            ],
        }
        text = json.dumps(json_ready(content), indent=1, ensure_ascii=False, allow_nan=False)
        if path is not None:
            write_atomically(Path(path), text + "\n")
        return text


def _median(values: list[float]) -> float:
    there = [value for value in values if not math.isnan(value)]
    return median(there) if there else math.nan


def _line(row: list[str], widths: list[int]) -> str:
    """The layer to the left, numbers to the right."""
    cells = [row[0].ljust(widths[0])]
    cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
    return "  ".join(cells).rstrip()


def json_ready(value: Any) -> Any:
    """A value with NaN and infinity replaced by None: JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_ready(item) for item in value]
    return value
