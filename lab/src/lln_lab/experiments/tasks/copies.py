"""A copy of a real set for the data folder, from Hugging Face's package ``datasets``.

    python -m lln_lab.experiments copy imdb cola --data FOLDER              # from the local cache
    python -m lln_lab.experiments copy imdb cola --data FOLDER --download   # may use the network

The loaders read files and nothing else, so whatever has been copied can be looked at, and a run
needs neither the package nor a network. White space inside a text becomes single spaces, because a
row of a table is one line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lln.errors import InvalidInputError
from lln.files import check_folder, replacing, write_atomically
from lln_lab.experiments.tasks import cats_dogs, glue, lra_image

# Rec. 601, as TensorFlow turns colours into grey.
GREY = np.array([0.2989, 0.587, 0.114])


@dataclass(frozen=True)
class Source:
    """Where a set is, and how its parts are written.

    Attributes:
        names: What ``datasets.load_dataset`` takes.
        parts: Part of the folder → part of the set.
        write: Takes the rows of a part and the path without its suffix.
        held_out: Whether valid is every fifth row of the set's only part, and train the others:
            a set may be sorted by class, so one end of it would not do.
    """

    names: tuple[str, ...]
    parts: dict[str, str]
    write: Callable[[Iterable[dict[str, Any]], Path], None]
    held_out: bool = False

    def rows_of(self, part: str, rows: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        """Those of the rows that belong to a part of the folder."""
        if not self.held_out:
            return rows
        return (row for place, row in enumerate(rows) if (place % 5 == 4) == (part == "valid"))


def _table(columns: tuple[str, ...]) -> Callable[[Iterable[dict[str, Any]], Path], None]:
    def write(rows: Iterable[dict[str, Any]], path: Path) -> None:
        lines = ["\t".join(("label", *columns))]
        for row in rows:
            texts = (" ".join(row[column].split()) for column in columns)
            lines.append("\t".join((str(int(row["label"])), *texts)))
        write_atomically(path.with_suffix(".tsv"), "\n".join(lines) + "\n")

    return write


def _text(rows: Iterable[dict[str, Any]], path: Path) -> None:
    write_atomically(path.with_suffix(".txt"), "".join(row["text"] for row in rows))


def _pictures(
    image: str, label: str, side: int, colour: bool
) -> Callable[[Iterable[dict[str, Any]], Path], None]:
    def write(rows: Iterable[dict[str, Any]], path: Path) -> None:
        images, labels = [], []
        for row in rows:
            pixels = np.asarray(row[image].convert("RGB").resize((side, side)))
            images.append(pixels if colour else np.rint(pixels @ GREY).astype(np.uint8))
            labels.append(int(row[label]))
        with replacing(path.with_suffix(".npz")) as file:
            np.savez_compressed(file, images=np.stack(images), labels=np.array(labels, np.uint8))

    return write


def _glue(name: str) -> Source:
    known = glue.SETS[name]
    dev = "validation_matched" if name == "mnli" else "validation"
    return Source(("glue", name), {"train": "train", known.dev: dev}, _table(known.columns))


SOURCES = {name: _glue(name) for name in glue.SETS} | {
    "imdb": Source(("stanfordnlp/imdb",), {"train": "train", "test": "test"}, _table(("text",))),
    "wikitext-2": Source(
        ("Salesforce/wikitext", "wikitext-2-v1"),
        {"train": "train", "valid": "validation", "test": "test"},
        _text,
    ),
    "cifar10-gray": Source(
        ("uoft-cs/cifar10",),
        {"train": "train", "test": "test"},
        _pictures("img", "label", lra_image.SIDE, colour=False),
    ),
    "cats-dogs": Source(
        ("microsoft/cats_vs_dogs",),
        {"train": "train", "valid": "train"},
        _pictures("image", "labels", cats_dogs.SIDE, colour=True),
        held_out=True,
    ),
}


def copy(data_set: str, folder: Path, *, download: bool = False) -> list[Path]:
    """Write the parts of a set that are not there yet; returns the files.

    Args:
        data_set: A key of `SOURCES`.
        folder: The data folder.
        download: Whether the package may use the network; otherwise only its local cache.

    Raises:
        InvalidInputError: If the set is not known, or the package or its copy is missing.
    """
    if data_set not in SOURCES:
        raise InvalidInputError(
            f"no set is called {data_set!r}; there are {', '.join(SOURCES)}. For wikipedia-en put "
            "train.txt and valid.txt there yourself, articles with an empty line between them."
        )
    source, home = SOURCES[data_set], folder / data_set
    check_folder(home, "--data")
    written = []
    for part, origin in source.parts.items():
        if any(home.glob(f"{part}.*")):
            continue
        rows = _load(source, origin, download)
        home.mkdir(parents=True, exist_ok=True)
        source.write(source.rows_of(part, rows), home / part)
        written += home.glob(f"{part}.*")
    return written


def _load(source: Source, part: str, download: bool) -> Any:
    if not download:
        # Read by the package when it is imported.
        os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InvalidInputError(
            "copying a set needs the package datasets; pip install datasets, or put the files into "
            "the data folder yourself."
        ) from error
    # For a program that has imported it before.
    datasets.config.HF_DATASETS_OFFLINE = not download
    settings = datasets.DownloadConfig(local_files_only=not download)
    try:
        return datasets.load_dataset(*source.names, split=part, download_config=settings)
    except Exception as error:
        fix = "try again later" if download else "add --download to fetch it"
        raise InvalidInputError(
            f"datasets has no copy of {'/'.join(source.names)} ({error}); {fix}."
        ) from error
