"""Loading checkpoints: what is damaged is said in one sentence, whichever library failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import Any

from lln.checks.reading import first_line, read_json
from lln.errors import InvalidInputError
from lln.integrations.settings import Settings, check_layers

_SAVE_AGAIN = "save the model again with model.save_pretrained(folder)"
_CONFIG = {"model_type?": (str, None), "architectures?": ([str], None), "lln?": (dict, None)}
# Bytes of a configuration; the names of 20,000 classes take two million. transformers takes seconds
# to print a longer one, which it always does.
_MOST_CONFIG = 5_000_000


@contextmanager
def loading(folder: Path, failed: str) -> Iterator[None]:
    """Turn whatever goes wrong in the body into one sentence.

    Args:
        folder: Of the checkpoint.
        failed: How the sentence begins, such as ``"'model' cannot be loaded"``.

    Raises:
        InvalidInputError: Whatever the body raised.
    """
    try:
        yield
    # Damage shows as whatever the first broken byte leads to, in any of four libraries.
    except Exception as error:
        raise InvalidInputError(f"{failed}: {_why(folder, error)}") from error


def check_files(folder: Path) -> None:
    """Refuse a checkpoint whose configuration or index cannot be used, before it is loaded.

    Raises:
        InvalidInputError: One sentence that names the file.
    """
    path = folder / "config.json"
    found = read_json(path, _CONFIG, "a configuration of a model", _SAVE_AGAIN, _MOST_CONFIG)
    try:
        check_layers(Settings.of(SimpleNamespace(**found)).layers)
    except InvalidInputError as error:
        raise InvalidInputError(f"{str(path)!r} cannot be used: {error}") from error
    for index in sorted(folder.glob("*.index.json")):
        indexed_files(index, _SAVE_AGAIN)


def indexed_files(index: Path, fix: str) -> set[str]:
    """The names of the files that an index of weights lists: they lie beside it.

    Args:
        index: Such as ``model.safetensors.index.json``.
        fix: What to do if it cannot be used, for the message.

    Raises:
        InvalidInputError: One sentence.
    """
    found: Any = read_json(index, {"weight_map": {str: str}}, "an index of weights", fix)
    names = set(found["weight_map"].values())
    for name in sorted(names):
        inside = Path(name).name == name and "\\" not in name
        if not inside or not (index.parent / name).is_file():
            where = "which is not beside it" if inside else "which is no name of a file beside it"
            raise InvalidInputError(f"{str(index)!r} lists {name[:200]!r}, {where}; {fix}.")
    return names


def _why(folder: Path, error: Exception) -> str:
    """The reason, as the end of a sentence."""
    if isinstance(error, (UnpicklingError, EOFError)):
        pickled = sorted(folder.glob("*.bin"))
        name = pickled[0].name if pickled else "its file"
        return (
            f"{name} is a pickle that is broken or holds more than tensors, which could run any "
            "program and is not opened; where you trust it, load it and save the model again with "
            "model.save_pretrained(folder), which writes model.safetensors."
        )
    return first_line(error) + "."
