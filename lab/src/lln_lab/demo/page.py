"""The page: everything in one HTML file, without scripts or external files."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from lln_lab.bench.spread import NOISY
from lln_lab.demo.concentration import KERNELS, MAPPED, Concentration
from lln_lab.demo.demo_charts import (
    LABELS,
    concentration_charts,
    speed_chart,
    training_chart,
)
from lln_lab.demo.headlines import concentration_headline, speed_headline, training_headline
from lln_lab.demo.speed import TIMED, Speed
from lln_lab.demo.state import Part, State
from lln_lab.demo.trainees import Training
from lln_lab.report.chart import inline_svg
from lln_lab.report.json_text import json_text
from lln_lab.report.page_environment import read_environment
from lln_lab.report.picture import colour_bar, matrix_picture
from lln_lab.report.rendering import render


@dataclass
class Demo:
    """Everything the page shows."""

    concentration: Concentration = field(default_factory=Concentration)
    speed: Speed = field(default_factory=Speed)
    training: Training = field(default_factory=Training)
    environment: dict[str, str] = field(default_factory=read_environment)
    interrupted: bool = False

    def parts(self) -> dict[str, Part]:
        """The parts by name, in order."""
        return {
            "concentration": self.concentration,
            "speed": self.speed,
            "training": self.training,
        }

    def lacking(self) -> list[str]:
        """Parts that are not complete."""
        return [name for name, part in self.parts().items() if part.state is not State.DONE]


def render_page(demo: Demo) -> str:
    """The page with the results so far."""
    concentration, speed, training = demo.concentration, demo.speed, demo.training
    headlines, charts, pictures = {}, {}, {}
    if concentration.has_results:
        headlines["concentration"] = concentration_headline(concentration)
        charts["entropy"], charts["gap"] = map(inline_svg, concentration_charts(concentration))
        pictures = {
            name: matrix_picture(concentration.maps[name])
            for name in MAPPED
            if name in concentration.maps
        }
    if speed.has_results:
        headlines["speed"] = speed_headline(speed)
        charts["speed"] = inline_svg(speed_chart(speed))
    if training.has_results:
        headlines["training"] = training_headline(training)
        charts["training"] = inline_svg(training_chart(training))
    return render(
        "demo/page.html",
        title="LLN attention demo",
        running=bool(demo.lacking()) and not demo.interrupted,
        demo=demo,
        State=State,
        headlines=headlines,
        charts=charts,
        pictures=pictures,
        colour_bar=colour_bar,
        kernels=KERNELS,
        labels=LABELS,
        timed=list(TIMED),
        noisy=NOISY,
        busy=_busy(demo.environment),
    )


def _busy(environment: dict[str, str]) -> str:
    """The load, if other programs kept the processors busy when the demo started."""
    load, cores = float(environment.get("load at start", 0)), os.cpu_count() or 1
    return "" if load < 0.7 * cores else f"load {load:.1f} on {cores} CPUs"


def render_json(demo: Demo) -> str:
    """The numbers of the page."""
    content = {
        "complete": not demo.lacking(),
        "environment": demo.environment,
        **{name: part.as_json() for name, part in demo.parts().items()},
    }
    return json_text(content)
