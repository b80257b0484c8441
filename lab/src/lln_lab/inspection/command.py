"""Runs an inspection: load the model, run it once, measure layer by layer, write the page."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lln import checks
from lln.errors import BackendUnavailableError, InvalidInputError
from lln.files import check_folder
from lln.instruments import capture
from lln.instruments.observed_call import SeenCall
from lln.integrations.progress import progress_bar
from lln.matching.calibration import ENOUGH_TOKENS
from lln_lab.inspection.choice import Chosen, choose_heads, parse_heads, refuse_missing_heads
from lln_lab.inspection.findings import findings
from lln_lab.inspection.key_needs import mass_table
from lln_lab.inspection.page import render_json, render_page
from lln_lab.inspection.page_needs import page_table
from lln_lab.inspection.study import INSTRUMENTS, Study, study_layer
from lln_lab.inspection.text import read_text
from lln_lab.new_files import check_file
from lln_lab.report.page_environment import read_environment
from lln_lab.report.page_file import PageFile

if TYPE_CHECKING:
    from torch import Tensor

    from lln_lab.inspection.local_model import LocalModel

NAME = "lln-inspect"
TOKENS = 512
# With fewer tokens a row of weights has no distribution, and α varies by a quarter or more (see
# `lln.matching.calibration.ENOUGH_TOKENS`).
FEWEST_TOKENS = 8
_LEAST = {"pages": 1, "page_size": 1, "window": 0, "sinks": 0}
# Progress steps per layer: its instruments, the search for α and β, LLN's own measurements.
_STEPS = 3


def run_inspect(
    model: str,
    out: Path,
    *,
    text: Path | None = None,
    tokens: int = TOKENS,
    samples: int = 1,
    heads: str | None = None,
    pages: int | None = None,
    page_size: int | None = None,
    window: int | None = None,
    sinks: int | None = None,
    echo: Callable[[str], object] = lambda _: None,
) -> Path:
    """Measure the attention of a local model and write a page about it.

    The page and its JSON are rewritten as layers come in, each in one step. After Ctrl-C or an
    error they contain what was measured until then.

    Args:
        model: A folder, or a hub name in this machine's cache.
        out: Folder for ``lln-inspect.html`` and ``lln-inspect.json``.
        text: Text file; None = documentation of Python's standard library.
        tokens: Length of a sequence; less if the model or the text has no more.
        samples: Sequences; values are medians over them.
        heads: Heads to show in detail, such as ``"0.3,5.11"``; None = the extremes.
        pages: How many pages a query would see; a quarter to four times as many are compared. None,
            here and in the next three: as in a conversion.
        page_size: Tokens in a page.
        window: Tokens that a query would see before its own, or on either side.
        sinks: First tokens that every query would see.
        echo: Takes the lines meant for the terminal.

    Returns:
        The page's path.

    Raises:
        InvalidInputError: One sentence if an argument cannot be used, or no attention is seen.
        BackendUnavailableError: If transformers is not installed.
        KeyboardInterrupt: After Ctrl-C, once the page is written.
    """
    checks.check_count("--tokens", tokens, least=FEWEST_TOKENS)
    checks.check_count("--samples", samples)
    given = {"pages": pages, "page_size": page_size, "window": window, "sinks": sinks}
    sizes = {name: size for name, size in given.items() if size is not None}
    for name, size in sizes.items():
        checks.check_count(f"--{name.replace('_', '-')}", size, least=_LEAST[name])
    asked = parse_heads(heads)
    page = _page_path(out)
    content = read_text(text)
    local = _load(model)
    longest = local.longest
    if longest is not None and tokens > longest:
        echo(f"{local.name} takes {longest} tokens at most; measuring on {longest}.")
        tokens = longest
    ids = local.encode(content.content, tokens, samples)
    _check_length(ids.shape[1], tokens, longest, echo)
    study = Study(
        local.name,
        local.architecture,
        content.name,
        ids.shape[1],
        ids.shape[0],
        environment=read_environment(),
    )
    by_layer = _count_heads(local, ids[:1])
    study.expected_layers = len(by_layer)
    refuse_missing_heads(asked, by_layer)
    file = PageFile(
        page,
        lambda: render_page(study, _shown(study, asked)),
        lambda: render_json(study, _shown(study, asked)),
    )
    try:
        _measure(study, local, ids, file, sizes)
    except KeyboardInterrupt:
        study.stopped = True
        file.write()
        echo(f"Stopped. What was measured so far: {page}")
        raise
    except Exception:
        if study.layers:
            study.stopped = True
            file.write()
        raise
    for sentence in findings(study).values():
        echo(sentence)
    for table in filter(None, (mass_table(study), page_table(study))):
        echo(table)
    for index, layer in enumerate(study.layers):
        if layer.problem:
            echo(f"Layer {index} ({layer.name}): {layer.problem}.")
    echo(f"The page: {page}")
    return page


def _measure(
    study: Study, local: LocalModel, ids: Tensor, file: PageFile, pages: dict[str, int]
) -> None:
    start = time.perf_counter()
    with progress_bar() as bar:
        task = bar.add_task("layer 0", total=_STEPS * study.expected_layers)

        def take(seen: SeenCall) -> None:
            bar.advance(task)
            ticks = 1

            def tick() -> None:
                nonlocal ticks
                ticks += 1
                bar.advance(task)

            study.layers.append(study_layer(seen, tick, pages))
            bar.advance(task, _STEPS - ticks)
            bar.update(task, description=f"layer {len(study.layers)}")
            study.seconds = time.perf_counter() - start
            if len(study.layers) < study.expected_layers:
                file.write_if_due()

        with capture(local.model, instruments=INSTRUMENTS, on_call=take):
            local.run(ids)
    study.expected_layers = len(study.layers)
    file.write()


def _shown(study: Study, asked: list[tuple[int, int]] | None) -> list[Chosen]:
    """The heads to show in detail; before the end, some of those asked for may be unmeasured."""
    whole = len(study.layers) == study.expected_layers
    return choose_heads(study, asked if whole else None)


def _count_heads(local: LocalModel, ids: Tensor) -> list[int]:
    """Number of heads of every attention call, from a short forward pass without measurements."""
    heads: list[int] = []
    with capture(
        local.model, instruments=(), on_call=lambda seen: heads.append(seen.query.shape[-3])
    ):
        local.run(ids[:, :2])
    return heads


def _check_length(
    found: int, asked: int, longest: int | None, echo: Callable[[str], object]
) -> None:
    """Refuse a sequence that is too short to measure on, and warn about a short one."""
    if found < FEWEST_TOKENS:
        raise InvalidInputError(
            f"the text makes {found} token{'s' * (found != 1)}, too few to measure attention on "
            f"({FEWEST_TOKENS} at least, {ENOUGH_TOKENS} or more are better); give a longer --text."
        )
    if found < ENOUGH_TOKENS:
        fix = "; raise --tokens" if found >= asked else "; give a longer --text"
        if found == longest:
            fix = ""
        echo(f"{found} tokens are few to measure on, {ENOUGH_TOKENS} or more are better{fix}.")


def _load(model: str) -> LocalModel:
    try:
        from lln_lab.inspection.local_model import load_local_model
    except ImportError as error:
        raise BackendUnavailableError(
            "lln inspect reads Hugging Face models; run pip install 'lln[hf]'."
        ) from error
    return load_local_model(model)


def _page_path(out: Path) -> Path:
    check_folder(out, "--out")
    page = out / f"{NAME}.html"
    for path in (page, page.with_suffix(".json")):
        check_file(path, "--out")
    return page
