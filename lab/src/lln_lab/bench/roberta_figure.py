"""Time and memory of a training step of RoBERTa-base over the length, drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lln_lab.bench.length_axis import label_lengths, machine_of, points
from lln_lab.bench.result_rows import Row
from lln_lab.bench.roberta import SYSTEMS
from lln_lab.drawing import save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOOKS: dict[str, tuple[str, str]] = {
    "softmax_sdpa": ("#000000", "o"),
    "softmax_naive": ("#777777", "s"),
    "nystromformer": ("#009E73", "v"),
    "lln": ("#0072B2", "^"),
    "lln_diag": ("#D55E00", "D"),
    "diag": ("#E69F00", "x"),
}


def draw_roberta(results: dict[str, Any], path: Path) -> list[Path]:
    """Draw batch 1 over the length; returns the files, an SVG and a PNG, or none without rows.

    Args:
        results: Content of a results file of ``lln bench roberta``.
        path: Where to write; the suffix is replaced.
    """
    rows = [row for row in results["cases"] if row["part"] in ("batch 1", "graph")]
    fields = [name for name in ("milliseconds", "peak_bytes") if any(r.get(name) for r in rows)]
    if not fields:
        return []
    precision = "bfloat16 autocast" if results.get("autocast") else "float32"
    title = f"One training step of RoBERTa-base, batch 1, {precision}, {machine_of(results)}"
    if any(row["part"] == "graph" for row in rows):
        title += "; dashed: replayed as a CUDA graph"

    def fill(figure: Figure) -> None:
        panels = figure.subplots(1, len(fields), squeeze=False)[0]
        for axes, field in zip(panels, fields, strict=True):
            _panel(axes, rows, field)
            # Each panel explains the ends of its own curves.
            told = None if len(fields) == 1 else field == "peak_bytes"
            _tell_ends(axes, rows, field, told)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
        figure.suptitle(title, fontsize=9)

    return save(path, (9.5, 4.2), fill)


def _panel(axes: Axes, rows: list[Row], field: str) -> None:
    for name, (colour, marker) in _LOOKS.items():
        for part, line in (("batch 1", "-"), ("graph", "--")):
            own = _points(rows, name, field, part)
            label = SYSTEMS[name][0] if part == "batch 1" else None
            if own:
                axes.plot(*zip(*own, strict=True), line, color=colour, marker=marker, label=label)
    axes.margins(x=0.09, y=0.08)
    axes.set_xlabel("tokens N")
    axes.set_ylabel("gigabytes at peak" if field == "peak_bytes" else "milliseconds per step")
    label_lengths(axes, sorted({row["tokens"] for row in rows if row.get(field)}))
    _label_between(axes)


def _tell_ends(axes: Axes, rows: list[Row], field: str, memory: bool | None) -> None:
    """Write why curves end, once for those that end together.

    Args:
        axes: A panel.
        rows: The rows of all systems.
        field: What the panel shows.
        memory: True = only ends out of memory, False = only others, None = all.
    """
    ends: dict[tuple[int, str], float] = {}
    for name in _LOOKS:
        last = max(_points(rows, name, field), default=None)
        why = _why_it_ends([row for row in rows if row["system"] == name])
        if last and why and memory in (None, why == "out of memory"):
            ends[last[0], why] = max(last[1], ends.get((last[0], why), 0.0))
    for (tokens, why), height in ends.items():
        axes.annotate(
            why, (tokens, height), xytext=(-4, 6), textcoords="offset points", fontsize=7,
            color="#555555", ha="right",
        )  # fmt: skip


def _points(
    rows: list[Row], name: str, field: str, part: str = "batch 1"
) -> list[tuple[int, float]]:
    own = [row for row in rows if (row["system"], row["part"]) == (name, part)]
    return points(own, field, 1e-9 if field == "peak_bytes" else 1.0)


def _why_it_ends(rows: list[Row]) -> str | None:
    """Why no longer sequence was measured, if that is known."""
    states = {row["status"] for row in rows if row["part"] == "batch 1"} - {"timed"}
    return min(states, default=None)


def _label_between(axes: Axes) -> None:
    """Numbers at 2 and 5 too: a training step seldom spans two powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.yaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
