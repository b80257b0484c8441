"""``lln figure``: measures one figure of the paper, keeps its numbers and draws it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lln.checks.names import did_you_mean
from lln.errors import InvalidInputError
from lln.files import write_atomically
from lln.integrations.progress import progress_bar
from lln_lab.compact import compact_json
from lln_lab.drawing import SUFFIXES, save
from lln_lab.figures import (
    evidence,
    matched_moments,
    single_head,
    softmax_moments,
    sums,
    temperature_sweep,
)
from lln_lab.figures.setting import Results, Setting
from lln_lab.machine import check_device
from lln_lab.new_files import check_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Echo = Callable[[str], None]


class FigurePlan(NamedTuple):
    """How a figure is made."""

    measure: Callable[[Setting], Results]
    draw: Callable[[Figure, Results], None]
    size: tuple[float, float]


FIGURES = {
    "1": FigurePlan(single_head.measure, single_head.draw, single_head.SIZE),
    "2": FigurePlan(temperature_sweep.measure, temperature_sweep.draw, temperature_sweep.SIZE),
    "5a": FigurePlan(softmax_moments.measure, softmax_moments.draw, softmax_moments.SIZE),
    "5b": FigurePlan(matched_moments.measure_5b, matched_moments.draw_5b, matched_moments.SIZE),
    "6a": FigurePlan(sums.measure_moderate, sums.draw_moderate, sums.SIZE),
    "6b": FigurePlan(sums.measure_broad, sums.draw_broad, sums.SIZE),
    "7": FigurePlan(matched_moments.measure_7, matched_moments.draw_7, matched_moments.SIZE),
    "theory": FigurePlan(evidence.measure, evidence.draw, evidence.SIZE),
}


def run(
    name: str,
    *,
    out: Path,
    results: Path | None,
    device: str,
    quick: bool,
    echo: Echo,
    data: Path | None = None,
    work: Path | None = None,
) -> None:
    """Measures and draws one figure.

    Args:
        name: A key of `FIGURES`.
        out: Folder of the PNG and SVG.
        results: Folder of the numbers; None = ``out``.
        device: ``"cpu"`` or ``"cuda"``.
        quick: A coarse version in seconds.
        echo: Receives what was written, line by line.
        data: Text that figure 1 trains on; None = the standard library's source.
        work: Where figure 1 saves its training state; None = it cannot be resumed.

    Raises:
        InvalidInputError: For an unknown figure or device.
        BackendUnavailableError: If matplotlib or scipy is missing.
    """
    name = name.lower()
    if name not in FIGURES:
        meant = did_you_mean(name, FIGURES)
        raise InvalidInputError(
            f"there is no figure {name!r}{meant}; choose from {', '.join(FIGURES)}."
        )
    check_device(device)
    plan = FIGURES[name]
    path = (out if results is None else results) / f"figure-{name}.json"
    places = {out / f"figure-{name}{suffix}": "--out" for suffix in SUFFIXES}
    places[path] = "--out" if results is None else "--results"
    if name == "1" and work is not None:
        places[work] = "--work"
    for place, option in places.items():
        check_file(place, option)
    with progress_bar() as bar:
        task = bar.add_task(f"figure {name}", total=1.0)
        setting = Setting(
            device=device,
            quick=quick,
            progress=lambda share: bar.update(task, completed=share),
            data=data,
            work=work,
        )
        found = plan.measure(setting)
    record = {"figure": name, "made_by": setting.describe(name), **found}
    # The numbers are saved first: if drawing fails, it can be repeated.
    write_atomically(path, compact_json(rounded(record)))
    echo(f"wrote {path}")
    for path in save(out / f"figure-{name}", plan.size, lambda figure: plan.draw(figure, found)):
        echo(f"wrote {path}")


def rounded(value: object) -> object:
    """The content with all numbers rounded to six digits, at any depth."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value
