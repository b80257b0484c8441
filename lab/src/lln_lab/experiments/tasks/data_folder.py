"""The folder with real data: find a set in it, check its files, read them.

The folder is a setting of the user, ``--data FOLDER`` or the variable ``LLN_DATA``; nothing is
ever downloaded. It holds one folder per set, and a set holds one file per part:

    imdb/train.tsv.xz          rows: an integer label, then one text per column
    wikipedia-en/valid.txt.xz  plain text
    cifar10-gray/test.npz      arrays: uint8 images and labels, or coefficients as in a JPEG

`lln_lab.experiments.tasks.copies` writes such files from the package ``datasets``.

Texts may be compressed (``.xz``) or not. In a table the first line names the columns, fields are
separated by tabs, and there is no quoting, so a field holds neither a tab nor a line break.

`known_files.json` has the size and SHA-256 of the files that the published results were measured
with. A file with the known sum is read without a word. One of the known size with another sum is
damaged, and so is one that does not decompress: both are refused. Everything else in the right
format is somebody's own copy; it is read, with a warning that results may differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lln.errors import InvalidInputError
from lln_lab.saved_data import read_arrays as arrays_of
from lln_lab.texts import read_utf8

VARIABLE = "LLN_DATA"
KNOWN = json.loads((Path(__file__).parent / "known_files.json").read_text("utf-8"))

TEXT = (".txt.xz", ".txt")
TABLE = (".tsv.xz", ".tsv")
ARRAYS = (".npz",)

_COPY_AGAIN = "copy the file again"


class OwnCopyWarning(UserWarning):
    """A file is read that is not the one the published results were measured with."""


class Row(NamedTuple):
    """One line of a table.

    Attributes:
        label: Class of the example, from 0.
        texts: The other columns.
    """

    label: int
    texts: tuple[str, ...]


def data_folder(given: Path | str | None = None) -> Path:
    """The folder with the data.

    Args:
        given: The value of ``--data``; None = the variable ``LLN_DATA``.

    Raises:
        InvalidInputError: If neither names a folder.
    """
    named = given if given is not None else os.environ.get(VARIABLE)
    if not named:
        raise InvalidInputError(
            f"the folder with the data is not given; pass --data FOLDER, or set {VARIABLE} to the "
            "folder that holds imdb/, mnli/ and so on."
        )
    folder = Path(named)
    if not folder.is_dir():
        origin = "--data" if given is not None else VARIABLE
        raise InvalidInputError(
            f"{origin} {str(folder)!r} is not a folder; name the one that holds imdb/, mnli/ and "
            "so on."
        )
    return folder


def find_part(folder: Path | None, data_set: str, part: str, suffixes: tuple[str, ...]) -> Path:
    """The checked file of one part of a set.

    Args:
        folder: See `data_folder`.
        data_set: Folder of the set, such as ``"imdb"``.
        part: Name of the file without its suffix, such as ``"train"``.
        suffixes: `TEXT`, `TABLE` or `ARRAYS`; the first that exists is taken.

    Raises:
        InvalidInputError: If there is no such file, or it is damaged.
    """
    home = data_folder(folder)
    for suffix in suffixes:
        path = home / data_set / f"{part}{suffix}"
        if path.is_file():
            _check(path, f"{data_set}/{path.name}")
            return path
    names = " or ".join(f"{part}{suffix}" for suffix in suffixes)
    fix = f"put it there, or give the folder that has {data_set}/ with --data or {VARIABLE}"
    if any((home / f"{part}{suffix}").is_file() for suffix in suffixes):
        fix = f"{str(home)!r} looks like one set itself: give the folder around it"
    raise InvalidInputError(f"{str(home / data_set)!r} has no file {names}; {fix}.")


def text_file(given: Path | str | None, part: str) -> Path:
    """A part of plain text: of a folder that holds it itself, or of the data's ``wikipedia-en``.

    Args:
        given: A folder with ``train.txt`` and ``valid.txt`` (or ``.txt.xz``), or see `data_folder`.
        part: ``"train"`` or ``"valid"``.
    """
    home = data_folder(given)
    for suffix in TEXT:
        if (home / f"{part}{suffix}").is_file():
            return home / f"{part}{suffix}"
    return find_part(home, "wikipedia-en", part, TEXT)


def read_text(folder: Path | None, data_set: str, part: str) -> str:
    """The text of a part of a set; see `find_part`."""
    return read_utf8(find_part(folder, data_set, part, TEXT), "the data file")


def read_rows(
    folder: Path | None, data_set: str, part: str, columns: tuple[str, ...], classes: int
) -> list[Row]:
    """The rows of a part of a set.

    Args:
        folder: See `data_folder`.
        data_set: Folder of the set.
        part: Name of the file without its suffix.
        columns: Names of the columns after ``label``, in order.
        classes: Labels must be below this.

    Raises:
        InvalidInputError: If a line does not fit.
    """
    path = find_part(folder, data_set, part, TABLE)
    # Not splitlines, which also breaks lines at characters that occur inside texts.
    lines = read_utf8(path, "the data file").rstrip("\n").split("\n")
    header = ("label", *columns)
    if tuple(lines[0].split("\t")) != header:
        raise InvalidInputError(
            f"the first line of {str(path)!r} must name the columns {', '.join(header)}, separated "
            f"by tabs, but is {lines[0][:80]!r}."
        )
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        label, *texts = line.split("\t")
        if len(texts) != len(columns):
            raise InvalidInputError(
                f"line {number} of {str(path)!r} has {len(texts) + 1} columns instead of "
                f"{len(header)}; remove tabs and line breaks inside texts."
            )
        if not (label.isdecimal() and int(label) < classes):
            raise InvalidInputError(
                f"line {number} of {str(path)!r} has the label {label[:20]!r}; labels are whole "
                f"numbers from 0 to {classes - 1}."
            )
        rows.append(Row(int(label), tuple(texts)))
    if not rows:
        raise InvalidInputError(f"{str(path)!r} has no rows; copy the file again.")
    return rows


def read_arrays(
    folder: Path | None, data_set: str, part: str, names: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """Arrays of a part of a set, by name; see `find_part`."""
    path = find_part(folder, data_set, part, ARRAYS)
    return arrays_of(path, names, _COPY_AGAIN)


def read_pictures(
    folder: Path | None, data_set: str, part: str, shape: tuple[int, ...], classes: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Pictures of somebody's own copy, uint8 ``[n, *shape]``, and labels ``[n]``.

    None if the file does not hold plain ``images``, but what `block_images` decodes.

    Raises:
        InvalidInputError: If the arrays do not fit.
    """
    path = find_part(folder, data_set, part, ARRAYS)
    arrays = arrays_of(path, (), _COPY_AGAIN)
    if "images" not in arrays:
        return None
    if "labels" not in arrays:
        raise InvalidInputError(f"{str(path)!r} has images and no array labels; add it.")
    images, labels = arrays["images"], arrays["labels"]
    if images.shape != (len(labels), *shape) or images.dtype != np.uint8:
        raise InvalidInputError(
            f"images of {str(path)!r} must be uint8 of shape {(len(labels), *shape)}, one for "
            f"every label, got {images.dtype} of shape {images.shape}."
        )
    if not ((labels >= 0) & (labels < classes)).all():
        raise InvalidInputError(f"labels of {str(path)!r} must be from 0 to {classes - 1}.")
    return images, labels


def _check(path: Path, name: str) -> None:
    """Refuse a damaged file; warn about one that is not known."""
    known = KNOWN.get(name)
    if known is not None:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found == known["sha256"]:
            return
        if path.stat().st_size == known["bytes"]:
            raise InvalidInputError(
                f"{str(path)!r} is damaged: its SHA-256 is {found[:12]}… instead of "
                f"{known['sha256'][:12]}…; copy the file again."
            )
    warnings.warn(
        f"{str(path)!r} is not the file that the published results were measured with; it is "
        "read as your own copy, and results may differ.",
        OwnCopyWarning,
        stacklevel=4,
    )
