"""Image of Long Range Arena: the grey pixels of CIFAR-10, read as a sequence of 1,024 tokens.

A token is a grey level, row by row; the model learns from position alone that tokens 32 apart are
neighbours. Published code uses the level itself as the id, so black pixels are taken for padding
and masked out. Here the id is the level plus one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lln.errors import InvalidInputError
from lln_lab.experiments.tasks.block_images import decode_blocks
from lln_lab.experiments.tasks.data_folder import read_arrays, read_pictures
from lln_lab.experiments.tasks.held_out import held_out
from lln_lab.experiments.tasks.task import Examples, Task

CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
SIDE = 32


def lra_image(folder: Path | None, share: float = 0.1) -> Task:
    """The task, from ``cifar10-gray/train.npz`` and ``test.npz``.

    Args:
        folder: See `data_folder`.
        share: Share of train that becomes valid, the same of every class; LRA's is 5,000 of
            50,000.
    """
    images, labels = _read(folder, "train")
    chosen = held_out([(image.tobytes(),) for image in images], labels.tolist(), share)
    return Task(
        name="image",
        title="LRA Image: a part of CIFAR-10, grey, with JPEG loss; pixels as tokens",
        classes=len(CLASSES),
        vocabulary=257,
        train=_examples(images[~chosen], labels[~chosen]),
        valid=_examples(images[chosen], labels[chosen]),
        test=_examples(*_read(folder, "test")),
    )


def _read(folder: Path | None, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Grey levels uint8 ``[n, 32, 32]`` and labels ``[n]``."""
    own = read_pictures(folder, "cifar10-gray", part, (SIDE, SIDE), len(CLASSES))
    if own is not None:
        return own
    arrays = read_arrays(folder, "cifar10-gray", part, ("coef", "Q", "y"))
    images, labels = decode_blocks(arrays["coef"], arrays["Q"], SIDE), arrays["y"]
    if labels.shape != images.shape[:1] or (labels >= len(CLASSES)).any():
        raise InvalidInputError(
            f"y of cifar10-gray/{part}.npz must hold one label from 0 to 9 per image; copy the "
            "file again."
        )
    return images, labels


def _examples(images: np.ndarray, labels: np.ndarray) -> Examples:
    return Examples(images.reshape(len(images), -1).astype(np.uint16) + 1, labels)
