"""A study read back from its JSON, so that charts can be drawn again without the model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from lln.errors import InvalidInputError
from lln.studies.inspection.choice import Chosen
from lln.studies.inspection.study import Shape, StudiedLayer, Study


def read_study(path: Path) -> tuple[Study, list[Chosen]]:
    """The study that ``lln inspect`` wrote, and the heads it showed in detail.

    Raises:
        InvalidInputError: If the file holds no such study.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
        return _study(content), [
            Chosen(each["layer"], each["head"], each["why"]) for each in content["chosen_heads"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"{str(path)!r} is not a report of lln inspect; make one with `lln inspect MODEL`."
        ) from error


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
            )
        )
    study.expected_layers = len(study.layers)
    return study


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
