"""A cell of a table: one training, one JSON file.

What is finished is never run again; another training under the same name is an error, not a result.
What is published comes from a commit, so a changed tree may not write there.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lln.checks.reading import read_json
from lln.errors import InvalidInputError
from lln.files import write_atomically
from lln.testing.processor import PACKAGE
from lln_lab.compact import compact_json
from lln_lab.machine import uncommitted

LAB = Path(__file__).resolve().parents[3]
PUBLISHED = LAB / "results" / "experiments"


@dataclass(frozen=True)
class Cell:
    """One training.

    Attributes:
        experiment: Name of the table or figure.
        scale: ``"smoke"``, ``"small"`` or ``"full"``.
        task: What is trained on.
        method: The attention.
        seed: Of weights and order of the data.
    """

    experiment: str
    scale: str
    task: str
    method: str
    seed: int

    def path(self, folder: Path) -> Path:
        """Its file; letters, digits, dots, dashes and underscores only."""
        method = self.method.replace("/", "-").replace("+", "_with_")
        # Two methods that end up with one name are told apart by `is_finished`.
        method = re.sub(r"[^\w.-]+", "_", method)
        name = f"{self.task}.{method}.seed{self.seed}.json"
        return folder / self.experiment / self.scale / name

    @property
    def title(self) -> str:
        """For progress bars."""
        return f"{self.task} {self.method} {self.seed}"


# What `write` writes, and every table reads.
_FORM = {
    "cell": {"experiment": str, "scale": str, "task": str, "method": str, "seed": int},
    "config": dict,
    "setup?": dict,
}


def check_publishable(folder: Path) -> None:
    """Refuse to write published results from code that no commit holds.

    Raises:
        InvalidInputError: If that folder is one of the published ones and the code has changes.
    """
    places = (str(PACKAGE), str(LAB / "src"))
    if folder.resolve().is_relative_to(PUBLISHED) and uncommitted(*places):
        raise InvalidInputError(
            "src or lab/src has uncommitted changes, so no commit would say what these cells "
            "are; commit the changes first, or keep the cells elsewhere with --out FOLDER."
        )


def is_finished(cell: Cell, config: dict[str, Any], folder: Path) -> bool:
    """Whether its result is there.

    Raises:
        InvalidInputError: If the file holds a training with another configuration.
    """
    path = cell.path(folder)
    if not path.exists():
        return False
    if _read(path)["config"] != json.loads(json.dumps(config)):
        raise InvalidInputError(
            f"{path} holds a training with other settings; name another --out or remove it."
        )
    return True


def write(cell: Cell, config: dict[str, Any], result: dict[str, Any], folder: Path) -> None:
    """Keep a result, in one step."""
    path = cell.path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, compact_json({"cell": asdict(cell), "config": config, **result}))


def read_all(folder: Path, experiment: str, scale: str) -> list[dict[str, Any]]:
    """The finished cells of an experiment, sorted by file name."""
    paths = sorted((folder / experiment / scale).glob("*.json"))
    return [_read(path) for path in paths]


def read_results(path: Path, form: Any = dict) -> dict[str, Any]:
    """What an earlier run of a program left under ``--out``; empty if there is nothing."""
    if not path.exists():
        return {}
    return read_json(path, form, "a result of this program", "name another --out, or remove it")


def _read(path: Path) -> dict[str, Any]:
    return read_json(path, _FORM, "the result of a training", "remove it to train again")
