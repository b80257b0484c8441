"""Cats and dogs in colour, for a vision transformer.

The pictures are 64×64, reduced from the Kaggle set "Dogs vs. Cats"; published runs use 224×224.
Brightness is stored for every pixel, colour for every second one in both directions (YCbCr, as a
JPEG has it). The reported part is the file ``valid``; the part that chooses a checkpoint is cut
off ``train``.

Dimension legend: n pictures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lln.errors import InvalidInputError
from lln_lab.experiments.tasks.block_images import decode_blocks
from lln_lab.experiments.tasks.data_folder import read_arrays, read_pictures
from lln_lab.experiments.tasks.held_out import held_out

CLASSES = ("cat", "dog")
SIDE = 64

# Red, green and blue from brightness and the two colour differences (JFIF).
COLOURS = np.array(
    [[1, 0, 1.402], [1, -0.344136, -0.714136], [1, 1.772, 0]],
    dtype=np.float32,
)


class Pictures(Dataset):
    """Pictures of one part with their labels.

    Args:
        images: uint8 ``[n, 64, 64, 3]``, red, green and blue.
        labels: ``[n]``, a place in `CLASSES`.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        """Keep the arrays as they are: bytes save memory."""
        if len(images) != len(labels):
            raise ValueError("images and labels must have as many entries")
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        """N."""
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``pixel_values``, float32 ``[3, 64, 64]`` from 0 to 1, and ``labels``."""
        return {name: side[0] for name, side in self.__getitems__([index]).items()}

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """A batch at once; for `lln_lab.experiments.tasks.task.as_batch`."""
        images = torch.from_numpy(self.images[indices]).permute(0, 3, 1, 2)
        labels = torch.from_numpy(self.labels[indices].astype(np.int64))
        return {"pixel_values": images.float() / 255, "labels": labels}

    def first(self, count: int | None) -> Pictures:
        """The first pictures; None = all."""
        return Pictures(self.images[:count], self.labels[:count])


@dataclass(frozen=True)
class PictureTask:
    """Three parts of pictures; the counterpart of `Task`, whose examples are tokens.

    Attributes:
        name: Short, for files and tables.
        title: For readers; says what it is and what it is not.
        classes: Number of classes.
        train: To train on.
        valid: To choose a checkpoint by.
        test: To report.
    """

    name: str
    title: str
    classes: int
    train: Pictures
    valid: Pictures
    test: Pictures

    def first(self, train: int | None, rest: int | None) -> PictureTask:
        """A smaller task: the first pictures of every part."""
        return replace(
            self,
            train=self.train.first(train),
            valid=self.valid.first(rest),
            test=self.test.first(rest),
        )


def cats_dogs(folder: Path | None, share: float = 0.1) -> PictureTask:
    """The task, from ``cats-dogs/train.npz`` and ``valid.npz``.

    Args:
        folder: See `data_folder`.
        share: Share of the file ``train`` that becomes valid, the same of both classes.
    """
    images, labels = _read(folder, "train")
    chosen = held_out([(image.tobytes(),) for image in images], labels.tolist(), share)
    return PictureTask(
        name="cats_dogs",
        title="a part of Dogs vs. Cats at 64×64 pixels; the set's valid is the test",
        classes=len(CLASSES),
        train=Pictures(images[~chosen], labels[~chosen]),
        valid=Pictures(images[chosen], labels[chosen]),
        test=Pictures(*_read(folder, "valid")),
    )


def to_rgb(brightness: np.ndarray, blue: np.ndarray, red: np.ndarray) -> np.ndarray:
    """Colours of pictures whose colour differences are stored at half the size.

    Args:
        brightness: uint8 ``[n, S, S]``, Y.
        blue: uint8 ``[n, S / 2, S / 2]``, Cb; 128 = no difference.
        red: The same for Cr.

    Returns:
        uint8 ``[n, S, S, 3]``.
    """
    doubled = [half.repeat(2, axis=1).repeat(2, axis=2).astype(np.float32) for half in (blue, red)]
    channels = np.stack([brightness, doubled[0] - 128, doubled[1] - 128], axis=-1)
    return np.clip(np.rint(channels @ COLOURS.T), 0, 255).astype(np.uint8)


def _read(folder: Path | None, part: str) -> tuple[np.ndarray, np.ndarray]:
    own = read_pictures(folder, "cats-dogs", part, (SIDE, SIDE, 3), len(CLASSES))
    if own is not None:
        return own
    arrays = read_arrays(folder, "cats-dogs", part, ("Y", "Cb", "Cr", "QY", "QC", "y"))
    labels = arrays["y"]
    counts = {arrays[name].shape[1] for name in ("Y", "Cb", "Cr")} | {len(labels)}
    if len(counts) > 1 or (labels >= len(CLASSES)).any():
        raise InvalidInputError(
            f"the arrays of cats-dogs/{part}.npz must have as many pictures, and labels 0 or 1; "
            "copy the file again."
        )
    # A share at a time: as floating-point numbers all pictures together take a gigabyte.
    shares = [slice(start, start + 1000) for start in range(0, len(labels), 1000)]
    return np.concatenate([_pictures(arrays, share) for share in shares]), labels


def _pictures(arrays: dict[str, np.ndarray], share: slice) -> np.ndarray:
    brightness = decode_blocks(arrays["Y"][:, share], arrays["QY"], SIDE)
    blue, red = (
        decode_blocks(arrays[name][:, share], arrays["QC"], SIDE // 2) for name in ("Cb", "Cr")
    )
    return to_rgb(brightness, blue, red)
