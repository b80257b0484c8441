"""Text to train on: the standard library's own source, or what ``--data`` names."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lln.checks.reading import UNREADABLE, open_unpacked
from lln.errors import InvalidInputError

FEWEST_BYTES = 20_000
_MOST_BYTES = 32_000_000
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# One file in ten is held out.
_EVERY = 10


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes that are never trained on.

    Attributes:
        name: What the page calls it.
        split: How the held-out part was chosen, in words.
        train: uint8 ``[bytes]``.
        held_out: uint8 ``[bytes]``.
    """

    name: str
    split: str
    train: Tensor
    held_out: Tensor


def load_corpus(data: Path | None = None) -> Corpus:
    """Read the text and hold a part of it out.

    Args:
        data: A text file or a folder of text files; None = the Python standard library.

    Raises:
        InvalidInputError: One sentence if there is not enough text.
    """
    if data is None:
        source = "the Python standard library"
        name = f"the source of Python {platform.python_version()}'s standard library"
        texts = _read_folder(Path(sysconfig.get_paths()["stdlib"]), (".py",), _SKIPPED_FOLDERS)
        hint = "; name a text file or folder with --data"
    else:
        source, name, hint = f"--data {str(data)!r}", data.resolve().name or "the data", ""
        if not data.exists():
            raise InvalidInputError(f"{source} does not exist.")
        texts = _read_folder(data, None, set()) if data.is_dir() else _read_file(data)
    size = sum(len(text) for text in texts)
    if size == 0:
        raise InvalidInputError(f"{source} holds no readable text{hint}.")
    if size < FEWEST_BYTES:
        raise InvalidInputError(
            f"{source} holds {size:,} bytes of text, but the demo needs at least "
            f"{FEWEST_BYTES:,} to train on and to test with{hint}."
        )
    return _split(name, texts)


def log_frequency(text: Tensor) -> Tensor:
    """Logarithm of each byte's frequency, ``[256]``; a byte that never occurs counts once."""
    counts = torch.bincount(text.long(), minlength=256).float() + 1
    return (counts / counts.sum()).log()


def _split(name: str, texts: list[bytes]) -> Corpus:
    held_out = b"".join(texts[_EVERY - 1 :: _EVERY])
    size = sum(len(text) for text in texts)
    # With few or very unequal files, a whole file may be too little, or nearly everything.
    if not 0.02 <= len(held_out) / size <= 0.3:
        joined = b"".join(texts)
        cut = size - size // _EVERY
        return Corpus(
            name, "the last tenth of the text", _tensor(joined[:cut]), _tensor(joined[cut:])
        )
    kept = b"".join(text for index, text in enumerate(texts) if index % _EVERY != _EVERY - 1)
    split = f"every tenth of {len(texts):,} files"
    return Corpus(name, split, _tensor(kept), _tensor(held_out))


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _read_file(path: Path) -> list[bytes]:
    try:
        with open_unpacked(path) as file:
            text = file.read(_MOST_BYTES)
    except UNREADABLE as error:
        raise InvalidInputError(
            f"--data {str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from error
    return [] if b"\0" in text else [text]


def _read_folder(root: Path, suffixes: tuple[str, ...] | None, skip: set[str]) -> list[bytes]:
    """The text files of a folder in the order of their names, until there is enough."""
    texts: list[bytes] = []
    size = 0
    for path in _walk(root, skip):
        if suffixes is not None and path.suffix not in suffixes:
            continue
        try:
            with open_unpacked(path) as file:
                text = file.read(_MOST_BYTES - size)
        except UNREADABLE:
            continue
        # Skip binary files (with a NUL byte), and empty ones, which would count as one in ten.
        if not text or b"\0" in text:
            continue
        texts.append(text)
        size += len(text)
        if size >= _MOST_BYTES:
            break
    return texts


def _walk(root: Path, skip: set[str]) -> Iterator[Path]:
    """Files below a folder, sorted, one folder at a time, so that a huge tree is not scanned."""
    for folder, below, files in os.walk(root):
        below[:] = sorted(name for name in below if name not in skip and not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            # Pipes and devices would block the read.
            if not name.startswith(".") and path.is_file():
                yield path
