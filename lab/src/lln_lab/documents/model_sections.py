"""Sections and pictures of docs/inspect.md: all-MiniLM-L6-v2, measured by ``lln inspect``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median

from lln_lab.inspection.choice import Chosen
from lln_lab.inspection.findings import findings
from lln_lab.inspection.page import study_charts
from lln_lab.inspection.saved import read_study
from lln_lab.inspection.study import Study
from lln_lab.markdown import Section, table
from lln_lab.report.chart import svg_file
from lln_lab.report.numbers import number

NUMBERS = Path("lab/results/experiments/inspect_minilm.json")
FIGURES = Path("docs/figures/inspect")
PAGE = Path("docs/inspect.md")

COLUMNS = (
    ("entropy, bits", "entropy", 2),
    ("gap", "spectral_gap", 2),
    ("p", "score_variance.within_row", 1),
    ("σq²σk²", "theory.variance", 1),
    ("distance from normal", "log_normality.ks", 3),
    ("kurtosis of q", "gaussianity.query_kurtosis", 2),
    ("kurtosis of k", "gaussianity.key_kurtosis", 2),
    ("norms of q", "gaussianity.query_norms", 1),
    ("norms of k", "gaussianity.key_norms", 1),
    ("α", "lln.alpha", 2),
    ("β", "lln.beta", 2),
    ("LLN's gap", "lln.spectral_gap", 2),
    ("elsewhere", "lln.distance", 2),
    ("own block", "mass.block", 2),
    ("slots beside 64 keys", "mass.rest_64", 2),
)


def pictures(study: Study, chosen: list[Chosen]) -> dict[str, str]:
    """SVG files by name."""
    return {
        f"{name}.svg": svg_file([chart for chart, _, _ in group])
        for name, group in study_charts(study, chosen).items()
        if group
    }


def sections() -> Iterator[Section]:
    """What the page says of the model in numbers."""
    study, chosen = read_study(NUMBERS)
    parts = {f"finding-{name}": text for name, text in findings(study).items()}
    head = ["layer", *(label for label, _, _ in COLUMNS)]
    rows = [
        [
            str(index),
            *(number(median(layer.values[name]), f".{digits}f") for _, name, digits in COLUMNS),
        ]
        for index, layer in enumerate(study.layers)
    ]
    parts["layers"] = table(head, rows)
    parts["shown"] = "Heads, from above: " + "; ".join(f"{c.name}, {c.why}" for c in chosen) + "."
    environment = study.environment
    parts["setting"] = (
        f"{study.architecture}, {len(study.layers)} layers of {study.heads} heads of "
        f"{study.layers[0].width}; {study.tokens} tokens of {study.text}; "
        f"{study.seconds:.0f} seconds (PyTorch {environment['PyTorch']}, threads: "
        f"{environment['threads']}, {environment['system']})."
    )
    for name, text in parts.items():
        yield Section(PAGE, name, text)


def draw() -> None:
    """Write the pictures from the numbers."""
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name, drawn in pictures(*read_study(NUMBERS)).items():
        (FIGURES / name).write_text(drawn, encoding="utf-8", newline="\n")
