"""The figure of ``lln bench``: time and memory over the length, with the crossovers marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lln_lab.bench.compare import fastest_row
from lln_lab.bench.crossover import crossover
from lln_lab.bench.length_axis import label_lengths, machine_of
from lln_lab.bench.operations import OPERATIONS
from lln_lab.bench.result_rows import Row
from lln_lab.bench.spread import Timed, timed_in
from lln_lab.drawing import save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, distinct for every common colour blindness; markers differ too.
_LOOKS: dict[str, tuple[str, str]] = {
    "sdpa": ("#000000", "o"),
    "sdpa_flash": ("#777777", "s"),
    "sdpa_cudnn": ("#000000", "o"),
    "lln": ("#0072B2", "^"),
    "lln_matched": ("#56B4E9", "v"),
    "lln_diag": ("#D55E00", "D"),
    "sdpa_causal": ("#000000", "o"),
    "sdpa_flash_causal": ("#777777", "s"),
    "sdpa_cudnn_causal": ("#000000", "o"),
    "lln_causal": ("#0072B2", "^"),
    "lln_diag_causal": ("#D55E00", "D"),
    "fla_causal": ("#009E73", "v"),
    "fla_causal_raw": ("#9AD1BE", "v"),
}
# The operations for which the crossover with the fastest softmax is marked.
_MARKED = {
    "bidirectional": ("lln_matched", "lln_diag"),
    "causal": ("lln_causal", "lln_diag_causal"),
}


def draw_speed(results: dict[str, Any], path: Path, group: str = "bidirectional") -> list[Path]:
    """Draw time and memory over N; returns the files, an SVG and a PNG, or none without rows.

    Args:
        results: Content of a results file.
        path: Where to write; the suffix is replaced.
        group: ``"bidirectional"`` or ``"causal"``.
    """
    rows = main_series([row for row in results["cases"] if row["operation"] in _LOOKS], group)
    fields = ["graph_milliseconds", "peak_bytes"]
    if not any(row.get(fields[0]) for row in rows):
        fields[0] = "milliseconds"
    fields = [field for field in fields if any(row.get(field) for row in rows)]
    if not fields:
        return []

    def fill(figure: Figure) -> None:
        panels = figure.subplots(len(fields), 2, squeeze=False, sharey="row", sharex=True)
        for line, field in zip(panels, fields, strict=True):
            for axes, backward in zip(line, (False, True), strict=True):
                _panel(axes, [r for r in rows if r["backward"] == backward], field, group)
            line[0].set_ylabel("megabytes at once" if field == "peak_bytes" else "milliseconds")
        for axes, title in zip(panels[0], ("forward", "forward + backward"), strict=True):
            axes.set_title(title, fontsize=10)
        for axes in panels[-1]:
            axes.set_xlabel("tokens N")
        handles, labels = max((axes.get_legend_handles_labels() for axes in panels.flat), key=len)
        figure.legend(handles, labels, loc="outside lower center", ncols=5)
        figure.suptitle(_title(results, rows), fontsize=9)

    return save(path, (9.5, 1.1 + 3.0 * len(fields)), fill)


def main_series(rows: Sequence[Row], group: str) -> list[Row]:
    """The rows of one curve over N: one width and dtype, and one rule for the batch.

    If a file has several widths, the most common one is drawn; if it has both a fixed batch and a
    fixed number of tokens per batch, the one with more rows.
    """
    rows = [row for row in rows if OPERATIONS[row["operation"]].group == group]
    if not rows:
        return []
    kind = Counter((row["width"], row["dtype"]) for row in rows).most_common(1)[0][0]
    rows = [row for row in rows if (row["width"], row["dtype"]) == kind]
    most = max(row["batch"] * row["tokens"] for row in rows)
    single = [row for row in rows if row["batch"] == 1]
    constant = [row for row in rows if row["batch"] * row["tokens"] == most]
    return max(single, constant, key=len)


def _panel(axes: Axes, rows: Sequence[Row], field: str, group: str) -> None:
    series = {
        name: _curve([row for row in rows if row["operation"] == name], field) for name in _LOOKS
    }
    for name, points in series.items():
        if points:
            colour, marker = _LOOKS[name]
            heights = [point.median for point in points.values()]
            label = OPERATIONS[name].label
            axes.plot(list(points), heights, color=colour, marker=marker, label=label)
    lengths = sorted({row["tokens"] for row in rows})
    softmax = (fastest_row([r for r in rows if r["tokens"] == n], field, group) for n in lengths)
    _mark_crossovers(axes, series, _curve(filter(None, softmax), field), field, group)
    if lengths:
        label_lengths(axes, lengths)
        # Room for the sentences above the curves.
        heights = [point.median for points in series.values() for point in points.values()]
        highest = max(heights)
        if field == "peak_bytes" and highest < 10 * min(heights):
            # Values of similar size are compared best on an axis from zero.
            axes.set_yscale("linear")
            axes.set_ylim(0.0, 1.5 * highest)
        else:
            axes.set_ylim(top=3 * highest)


def _curve(rows: Iterable[Row], field: str) -> dict[int, Timed]:
    """Length → milliseconds or megabytes, by length."""
    scale = 1e-6 if field == "peak_bytes" else 1.0
    found = sorted((row["tokens"], timed_in(row, field)) for row in rows if row.get(field))
    return {tokens: time.times(scale) for tokens, time in found if time is not None}


def _mark_crossovers(
    axes: Axes,
    series: dict[str, dict[int, Timed]],
    best: dict[int, Timed],
    field: str,
    group: str,
) -> None:
    """Draw a dotted line, with a text, where a curve goes below that of the best softmax."""
    word = "smaller" if field == "peak_bytes" else "faster"
    height = 0.98
    for name in _MARKED[group]:
        found, label = crossover(best, series.get(name, {})), OPERATIONS[name].label
        if found is None:
            continue
        if found.place is not None:
            axes.axvline(found.place, 0, 0.8, color=_LOOKS[name][0], linewidth=1, linestyle=":")
        text = f"{label}: {found.verdict(word)}"
        axes.text(
            0.02, height, text, transform=axes.transAxes, va="top", fontsize=8,
            color=_LOOKS[name][0],
        )  # fmt: skip
        height -= 0.08


def _title(results: dict[str, Any], rows: Sequence[Row]) -> str:
    environment, row = results["environment"], rows[0]
    batches = {row["batch"] for row in rows}
    batch = "B = 1" if batches == {1} else f"B·N = {row['batch'] * row['tokens']:,}"
    how = ", as CUDA graphs" if any(row.get("graph_milliseconds") for row in rows) else ""
    count = environment["threads"]
    threads = "" if environment.get("triton") else f", {count} thread{'s' * (count > 1)}"
    return (
        f"{machine_of(results)}{threads}, {row['dtype']}, {batch}, H = {row['heads']}, "
        f"D = {row['width']}{how}"
    )
