"""Why a checkpoint cannot be loaded, in one sentence, whichever library failed."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError

from safetensors import SafetensorError

LOADING_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    ImportError,
    RuntimeError,
    EOFError,
    TypeError,
    UnpicklingError,
    SafetensorError,
)


def why_not_loaded(folder: Path, error: Exception) -> str:
    """The reason, as the end of a sentence.

    Args:
        folder: Of the checkpoint.
        error: One of `LOADING_ERRORS`.
    """
    if isinstance(error, (UnpicklingError, EOFError)):
        pickled = sorted(folder.glob("*.bin"))
        name = pickled[0].name if pickled else "its file"
        return (
            f"{name} is a pickle that is broken or holds more than tensors, which could run any "
            "program and is not opened; where you trust it, load it and save the model again with "
            "model.save_pretrained(folder), which writes model.safetensors."
        )
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".") + "."
