"""Small tasks that every machine has, in place of real data: they show that an experiment runs.

The smoke scale uses them, so that it needs no data folder. Their numbers are no evidence.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np

from lln_lab.experiments.tasks.byte_tokens import BYTE_VOCABULARY
from lln_lab.experiments.tasks.task import Examples, Task, padded

SIDE = 32


def stdlib_sources(count: int, least: int = 4096) -> list[bytes]:
    """Source files of the standard library with at least so many bytes, by name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = (path.read_bytes() for path in sorted(folder.glob("*.py")))
    texts = [text for text in found if len(text) >= least][:count]
    if len(texts) < count:
        raise FileNotFoundError(f"the standard library has only {len(texts)} such files here")
    return texts


def reversed_text(train: int, rest: int, length: int, vocabulary: int = BYTE_VOCABULARY) -> Task:
    """Is a stretch of source written forwards (1) or backwards (0)?"""
    rng = np.random.default_rng(0)
    sources = [np.frombuffer(text, np.uint8).astype(np.uint16) + 1 for text in stdlib_sources(30)]

    def examples(count: int) -> Examples:
        labels = np.arange(count) % 2
        texts = []
        for label in labels:
            source = sources[rng.integers(len(sources))]
            start = rng.integers(len(source) - length) if len(source) > length else 0
            text = source[start : start + length]
            texts.append(text if label else text[::-1])
        ids, lengths = padded(texts, length, np.uint16)
        return Examples(ids, labels, lengths)

    return Task(
        "text",
        "Python source forwards or backwards (a stand-in)",
        2,
        vocabulary,
        *(examples(count) for count in (train, rest, rest)),
    )


def source_halves(train: int, rest: int, length: int) -> Task:
    """Are two stretches of source from one file (1) or from two (0)?"""
    rng = np.random.default_rng(0)
    sources = [np.frombuffer(text, np.uint8).astype(np.uint16) + 1 for text in stdlib_sources(30)]

    def stretch(source: np.ndarray) -> np.ndarray:
        start = rng.integers(max(len(source) - length, 1))
        return padded([source[start : start + length]], length, np.uint16)[0][0]

    def examples(count: int) -> Examples:
        labels = np.arange(count) % 2
        rows = []
        for label in labels:
            first, second = rng.choice(len(sources), 2, replace=False)
            both = (sources[first], sources[first if label else second])
            rows.append(np.concatenate([stretch(source) for source in both]))
        return Examples(np.stack(rows), labels)

    return Task(
        "retrieval",
        "two stretches of one Python file or of two (a stand-in)",
        2,
        BYTE_VOCABULARY,
        *(examples(count) for count in (train, rest, rest)),
        pairs=True,
    )


def shapes(count: int, seed: int, channels: int = 0, side: int = SIDE) -> tuple[np.ndarray, ...]:
    """Noisy pictures of a disc (1) or a square (0), uint8 ``[n, side, side]`` or with channels."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    rows, columns = np.mgrid[:side, :side]
    pictures = []
    for label in labels:
        radius = rng.integers(side // 8, side // 4)
        y, x = rng.integers(radius, side - radius, 2)
        far = np.hypot(rows - y, columns - x)
        if not label:
            far = np.maximum(abs(rows - y), abs(columns - x))
        pictures.append(np.where(far <= radius, 200, 40) + rng.integers(0, 40, (side, side)))
    found = np.stack(pictures).astype(np.uint8)
    return (found[..., None].repeat(channels, -1) if channels else found), labels


def shape_pixels(train: int, rest: int) -> Task:
    """Disc or square, pixel by pixel: id = value + 1, so that black is not padding."""

    def examples(count: int, seed: int) -> Examples:
        pictures, labels = shapes(count, seed)
        return Examples(pictures.reshape(count, -1).astype(np.uint16) + 1, labels)

    parts = (examples(count, seed) for seed, count in enumerate((train, rest, rest)))
    return Task("image", "a disc or a square (a stand-in)", 2, BYTE_VOCABULARY, *parts)
