"""Text to run a model on: a file, or the documentation inside Python's own standard library."""

from __future__ import annotations

import ast
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from lln.errors import InvalidInputError
from lln_lab.texts import read_utf8

# Modules with long documentation in plain English.
_MODULES = ("statistics", "argparse", "doctest", "typing", "threading", "tarfile", "difflib")
_MOST_BYTES = 4_000_000


@dataclass(frozen=True)
class Text:
    """A text and what to call it."""

    name: str
    content: str


def read_text(path: Path | None) -> Text:
    """The text of a file; None = the documentation strings of some modules of Python.

    Raises:
        InvalidInputError: One sentence if there is no text to read.
    """
    if path is None:
        return Text(
            f"documentation strings of Python {platform.python_version()}'s standard library",
            "\n\n".join(_documentation()),
        )
    text = read_utf8(path, "--text", _MOST_BYTES)
    if not text.strip():
        raise InvalidInputError(f"--text {str(path)!r} holds no text; name a plain text file.")
    return Text(path.name, text)


def _documentation() -> list[str]:
    """Documentation strings of modules, classes and functions, in the order of the source."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for name in _MODULES:
        path = root / f"{name}.py"
        if not path.is_file():
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                found.append(ast.get_docstring(node) or "")
    texts = [text for text in found if text]
    if not texts:
        raise InvalidInputError(
            "this Python has no source of its standard library to read; name a file with --text."
        )
    return texts
