"""A study read back from its JSON, so that charts can be drawn again without the model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lln.checks.reading import read_json
from lln.errors import InvalidInputError
from lln.integrations.settings import CAUSAL_PAGES
from lln_lab.inspection.choice import Chosen
from lln_lab.inspection.study import Shape, StudiedLayer, Study

_NUMBER = (float, None)
_FORM = {
    "model": str,
    "architecture": str,
    "text": str,
    "tokens": int,
    "samples": int,
    "seconds": _NUMBER,
    "environment": dict,
    "complete": bool,
    "layers": [
        {
            "name": str,
            "kind": str,
            "heads": int,
            "head_width": int,
            "queries": int,
            "keys": int,
            "is_causal": (bool, None),
            "problem": (str, None),
            "no_lln_because": (str, None),
            "pages?": {name: int for name in CAUSAL_PAGES},
        }
    ],
    "values": {str: [[_NUMBER]]},
    "chosen_heads": [
        {
            "layer": int,
            "head": int,
            "why": str,
            "quantiles": [_NUMBER],
            "normal_quantiles": [_NUMBER],
            "softmax_histogram": [_NUMBER],
            "lln_histogram": [_NUMBER],
        }
    ],
}


def read_study(path: Path) -> tuple[Study, list[Chosen]]:
    """The study that ``lln inspect`` wrote, and the heads it showed in detail.

    Raises:
        InvalidInputError: If the file holds no such study.
    """
    what, fix = "a report of lln inspect", "make one with `lln inspect MODEL`"
    content = read_json(path, _FORM, what, fix)
    heads = [layer["heads"] for layer in content["layers"]]
    grids = content["values"].values()
    chosen = content["chosen_heads"]
    whole = all(
        len(grid) == len(heads)
        and all(len(row) >= count for row, count in zip(grid, heads, strict=True))
        for grid in grids
    )
    if not whole or not all(
        0 <= each["layer"] < len(heads) and 0 <= each["head"] < heads[each["layer"]]
        for each in chosen
    ):
        raise InvalidInputError(f"{str(path)!r} is not {what} (heads are missing); {fix}.")
    return _study(content), [Chosen(each["layer"], each["head"], each["why"]) for each in chosen]


def _study(content: dict[str, Any]) -> Study:
    study = Study(
        content["model"],
        content["architecture"],
        content["text"],
        content["tokens"],
        content["samples"],
        seconds=_number(content["seconds"]),
        environment=content["environment"],
        stopped=not content["complete"],
    )
    for index, layer in enumerate(content["layers"]):
        heads = layer["heads"]
        values = {
            name: [_number(value) for value in grid[index][:heads]]
            for name, grid in content["values"].items()
        }
        # Only the heads shown in detail have their distribution in the file.
        shapes = [Shape([], [], [], []) for _ in range(heads)]
        for each in content["chosen_heads"]:
            if each["layer"] == index:
                shapes[each["head"]] = Shape(
                    each["quantiles"],
                    each["normal_quantiles"],
                    each["softmax_histogram"],
                    each["lln_histogram"],
                )
        study.layers.append(
            StudiedLayer(
                layer["name"],
                layer["kind"],
                heads,
                layer["head_width"],
                layer["queries"],
                layer["keys"],
                layer["is_causal"],
                values,
                shapes,
                layer["problem"],
                layer["no_lln_because"],
                layer.get("pages", {}),
            )
        )
    study.expected_layers = len(study.layers)
    return study


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
