"""Time and memory of a training step of RoBERTa-base over the length, drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lln.studies.bench.roberta import SYSTEMS
from lln.studies.bench.speed_figure import plain_ticks, save_figure

if TYPE_CHECKING:
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
    has_graphs = any(row["part"] == "graph" for row in rows)

    def fill(figure: Figure) -> None:
        panels = figure.subplots(1, len(fields), squeeze=False)[0]
        for axes, field in zip(panels, fields, strict=True):
            ends: dict[tuple[int, str], float] = {}
            for name, (colour, marker) in _LOOKS.items():
                own = [row for row in rows if row["system"] == name]
                for part, line in (("batch 1", "-"), ("graph", "--")):
                    points = _points(own, part, field)
                    if points:
                        label = SYSTEMS[name][0] if part == "batch 1" else None
                        axes.plot(
                            *zip(*points, strict=True), line, color=colour, marker=marker,
                            label=label,
                        )  # fmt: skip
                last = max(_points(own, "batch 1", field), default=None)
                why = _why_it_ends(own)
                # Each panel tells the ends of its own quantity.
                if len(fields) > 1 and (why == "out of memory") != (field == "peak_bytes"):
                    continue
                if last is not None and why is not None:
                    ends[last[0], why] = max(last[1], ends.get((last[0], why), 0.0))
            # Curves that end together are told so once.
            for (tokens, why), height in ends.items():
                axes.annotate(
                    why, (tokens, height), xytext=(-4, 6), textcoords="offset points", fontsize=7,
                    color="#555555", ha="right",
                )  # fmt: skip
            axes.margins(x=0.09, y=0.08)
            axes.set_xlabel("tokens N")
            axes.set_ylabel("gigabytes at peak" if field == "peak_bytes" else "milliseconds a step")
            plain_ticks(axes, sorted({row["tokens"] for row in rows if row.get(field)}))
            _label_between(axes)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=6)
        environment = results["environment"]
        figure.suptitle(
            f"One training step of RoBERTa-base, batch 1, "
            f"{'bfloat16 autocast' if results.get('autocast') else 'float32'}, "
            f"{environment['device']}, torch {environment['torch']}"
            + ("; dashed: replayed as a CUDA graph" if has_graphs else ""),
            fontsize=9,
        )

    return save_figure(path, (9.5, 4.2), fill)


def _points(rows: list[dict[str, Any]], part: str, field: str) -> list[tuple[int, float]]:
    """Length and value of what was measured, by length."""
    scale = 1e-9 if field == "peak_bytes" else 1.0
    measured = [row for row in rows if row["part"] == part and row.get(field) is not None]
    return sorted((row["tokens"], row[field] * scale) for row in measured)


def _why_it_ends(rows: list[dict[str, Any]]) -> str | None:
    """Why no longer sequence was measured, if that is known."""
    states = {row["status"] for row in rows if row["part"] == "batch 1"} - {"timed"}
    return min(states, default=None)


def _label_between(axes: Any) -> None:
    """Numbers at 2 and 5 too: a training step seldom spans two powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.yaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
