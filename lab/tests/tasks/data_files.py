"""Small files in the format of the data folder, and what marks a test that needs the real one."""

import lzma
import os
import re
from pathlib import Path

import numpy as np
import pytest

needs_folder = pytest.mark.skipif(
    not os.environ.get("LLN_DATA"), reason="set LLN_DATA to the folder with the real data"
)
own_copies = pytest.mark.filterwarnings(
    "ignore:.*is not the file that the published"
    ":lln_lab.experiments.tasks.data_folder.OwnCopyWarning"
)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = text.encode("utf-8")
    path.write_bytes(lzma.compress(content) if path.suffix == ".xz" else content)
    return path


def write_rows(path: Path, columns: tuple[str, ...], rows: list[tuple]) -> Path:
    lines = [("label", *columns), *rows]
    return write(path, "".join("\t".join(map(str, line)) + "\n" for line in lines))


def write_arrays(path: Path, **arrays: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)
    return path


def coefficients(random: np.random.Generator, count: int, blocks: int) -> np.ndarray:
    return random.integers(-20, 20, (64, count, blocks)).astype(np.int8)


def is_one_sentence(error: pytest.ExceptionInfo) -> bool:
    """One line that ends in a full stop, and no other sentence inside."""
    message = str(error.value)
    return "\n" not in message and message.endswith(".") and not re.search(r"[.!?] [A-Z]", message)
