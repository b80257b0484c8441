"""Reading arrays and tensors that somebody else may have saved: data, never code.

Whatever is wrong with a file, it is one sentence that names the file, an `InvalidInputError`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lln.checks.reading import first_line
from lln.checks.schema import fault
from lln.errors import InvalidInputError


def read_saved(path: Path, schema: Any, what: str, fix: str, device: Any = "cpu") -> Any:
    """The content of a file of ``torch.save``, of which only data are read: no code runs.

    Args:
        path: The file.
        schema: Of its content, without the tensors in it, see `lln.checks.schema`.
        what: As in `lln.checks.reading.read_json`.
        fix: As in `lln.checks.reading.read_json`.
        device: Where tensors go.
    """
    import torch

    try:
        found = torch.load(path, device, weights_only=True)
    # Damage shows as whatever the first broken byte leads to.
    except Exception as error:
        problem = first_line(error)
    else:
        problem = fault(found, schema)
        if problem is None:
            return found
    raise InvalidInputError(f"{str(path)!r} is not {what} ({problem}); {fix}.")


def read_arrays(path: Path, names: Iterable[str], fix: str) -> dict[str, Any]:
    """The arrays of a file of ``numpy.savez``, by name; pickled objects are not opened.

    Args:
        path: The file.
        names: Arrays it must hold; none = all it holds.
        fix: What to do if it cannot be read, for the message.
    """
    import numpy as np

    names = list(names)
    try:
        # Opened here: numpy leaves a file open that it cannot read.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in names or arrays if name in arrays}
    # Damage shows as whatever the first broken byte leads to.
    except Exception as error:
        raise InvalidInputError(
            f"{str(path)!r} cannot be read: {first_line(error)}; {fix}."
        ) from error
    missing = [name for name in names if name not in found]
    if missing:
        raise InvalidInputError(
            f"{str(path)!r} has no array {' and '.join(missing)}; it must hold {', '.join(names)}."
        )
    return found
