"""Runs the demo: three parts, one progress bar, a page that is always up to date."""

from __future__ import annotations

import math
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path

from lln.errors import InvalidInputError
from lln.integrations.progress import progress_bar
from lln_lab.demo.byte_encoder import EncoderSize
from lln_lab.demo.concentration import Concentration
from lln_lab.demo.corpus import Corpus, load_corpus
from lln_lab.demo.headlines import concentration_headline, speed_headline, training_headline
from lln_lab.demo.page import Demo, render_json, render_page
from lln_lab.demo.speed import Speed
from lln_lab.demo.state import Clock, State, page_path
from lln_lab.demo.trainees import Training
from lln_lab.report.page_file import PageFile
from lln_lab.threads import faster_threads

SECONDS = 110.0
QUICK_SECONDS = 10.0
# Shares of the total time at which the first two parts should end.
_CONCENTRATION_END, _SPEED_END = 0.12, 0.35


def run_demo(
    out: Path,
    data: Path | None = None,
    seconds: float | None = None,
    quick: bool = False,
    open_browser: bool = False,
    echo: Callable[[str], object] = lambda _: None,
) -> Path:
    """Measure concentration, speed and learning on this machine and write a page about it.

    The page and its JSON are rewritten as results come in, each in one step. After Ctrl-C they
    contain what was measured until then and say what is missing.

    Args:
        out: The page's name if it ends in ``.html``, else the folder for ``lln-demo.html``.
        data: Text file or folder to train on; None = the Python standard library's source.
        seconds: Total time; None = 110, or 10 if quick.
        quick: Fewer and smaller measurements.
        open_browser: Whether to show the page at the end.
        echo: Takes the lines meant for the terminal.

    Returns:
        The page's path.

    Raises:
        InvalidInputError: One sentence if an argument cannot be used, before any work.
        KeyboardInterrupt: After Ctrl-C, once the page is written.
    """
    if seconds is None:
        seconds = QUICK_SECONDS if quick else SECONDS
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidInputError(f"--seconds must be a positive number, got {seconds!r}.")
    page = page_path(out)
    corpus = load_corpus(data)
    echo(f"About {seconds:.0f} seconds of measurements; Ctrl-C ends early and keeps the results.")
    with faster_threads():
        demo = _quick_demo() if quick else Demo()
        file = PageFile(page, lambda: render_page(demo), lambda: render_json(demo))
        try:
            _run_parts(demo, corpus, seconds, file)
        except KeyboardInterrupt:
            _mark_stopped(demo)
            file.write()
            echo(f"Stopped. What was measured so far: {page}")
            raise
    echo(concentration_headline(demo.concentration))
    echo(speed_headline(demo.speed))
    echo(training_headline(demo.training))
    echo(f"The page: {page}")
    if open_browser:
        webbrowser.open(page.resolve().as_uri())
    return page


def _run_parts(demo: Demo, corpus: Corpus, seconds: float, file: PageFile) -> None:
    clock = Clock(seconds)
    steps: tuple[tuple[str, float, Callable[[Clock], Iterator[float]]], ...] = (
        ("concentration", _CONCENTRATION_END, demo.concentration.measure),
        ("speed", _SPEED_END, demo.speed.measure),
        ("training", 1.0, lambda left: demo.training.measure(corpus, left)),
    )
    file.write()
    with progress_bar() as bar:
        task = bar.add_task("", total=1.0)
        begin = 0.0
        for name, end, measure in steps:
            bar.update(task, description=name, completed=begin)
            for fraction in measure(Clock(seconds * end - clock.spent)):
                bar.update(task, completed=begin + fraction * (end - begin))
                file.write_if_due()
            file.write()
            begin = end
        bar.update(task, completed=1.0)


def _mark_stopped(demo: Demo) -> None:
    demo.interrupted = True
    for part in demo.parts().values():
        if part.state is not State.DONE:
            part.state = State.STOPPED


def _quick_demo() -> Demo:
    return Demo(
        concentration=Concentration(tokens=128, score_variances=(0.25, 1.0, 4.0), seeds=1),
        speed=Speed(lengths=(128, 256, 512), most_runs=5),
        training=Training(size=EncoderSize(length=128), held_out=8, evaluations=5),
    )
