"""Batches for the recipes in which softmax learns, all of one shape and on the device of the host.

Batches depend on the step alone, so every method and every seed of the weights sees the same ones.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from lln_lab.experiments.captured import Batch
from lln_lab.experiments.gate_hosts import Frame, PhotoHost, WordHost
from lln_lab.experiments.table1 import pretraining
from lln_lab.experiments.tasks import stand_in
from lln_lab.experiments.tasks.augment import changed, mixed
from lln_lab.experiments.tasks.cats_dogs import CLASSES, Pictures, cats_dogs
from lln_lab.experiments.tasks.made_ahead import Arrays, kept
from lln_lab.experiments.tasks.masked_text import FreshlyHidden

Tests = dict[str, list[Batch]]


@dataclass(frozen=True)
class Place:
    """Where data come from and go to.

    Attributes:
        data: The folder of real data.
        work: Where what is made is kept.
        workers: Processes that make examples ahead.
    """

    data: Path | None
    work: Path
    workers: int


class TaskSource:
    """A task: its host, its batches, and its parts to choose and to report by."""

    device: torch.device

    def begin(self, first: int, last: int) -> None:
        """Start what makes the batches of these steps; before CUDA is used."""

    def close(self) -> None:
        """End it."""

    @abstractmethod
    def open(self, device: torch.device) -> None:
        """Put what is there on a device."""

    @abstractmethod
    def host(self, method: str, frame: Frame) -> nn.Module:
        """The host of a method."""

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """Of a training step."""

    @abstractmethod
    def tests(self, part: str) -> Tests:
        """Batches of ``"valid"`` or ``"test"``, by difficulty where there are several."""

    def random(self, step: int) -> torch.Generator:
        """What decides at a step."""
        return torch.Generator(self.device).manual_seed(1_000_003 * (step + 1))

    def on_device(self, arrays: Arrays) -> Batch:
        """Arrays as tensors, on the device of the host."""
        return {name: torch.from_numpy(side).to(self.device) for name, side in arrays.items()}


class Words(TaskSource):
    """Masked words of a text; as many in every window, so that all shapes are fixed.

    Args:
        place: See `Place`.
        batch: Windows per update.
        length: Words of a window.
        vocabulary: Of the tokenizer.
        share: Share of the words that is hidden.
    """

    def __init__(
        self, place: Place, batch: int, length: int, vocabulary: int, share: float = 0.15
    ) -> None:
        """Read or make the windows."""
        self.size, self.hidden = batch, round(share * length)
        path = place.work / "data" / f"words-{length}-{vocabulary}.npz"
        self.arrays = kept(path, partial(_windows, place.data, length, vocabulary))

    def open(self, device: torch.device) -> None:
        """See `TaskSource`."""
        self.device = device
        self.parts = {
            part: torch.from_numpy(self.arrays[part].astype(np.int32)).to(device)
            for part in ("train", "valid", "test")
        }
        self.vocabulary, self.mask, self.low, self.high = self.arrays["code"].tolist()

    def host(self, method: str, frame: Frame) -> nn.Module:
        """See `TaskSource`."""
        return WordHost(method, frame, self.vocabulary)

    def batch(self, step: int) -> Batch:
        """See `TaskSource`."""
        random, windows = self.random(step), self.parts["train"]
        chosen = torch.randint(len(windows), (self.size,), generator=random, device=self.device)
        return self._hidden(windows[chosen].long(), random)

    def tests(self, part: str) -> Tests:
        """See `TaskSource`; hidden once. The valid part is a sample."""
        windows = self.parts[part][: 2 * self.size if part == "valid" else None]
        # Always of the CPU, so that losses of all machines are of the same words.
        random = torch.Generator().manual_seed(0)
        shares = windows.cpu().long().split(self.size)
        batches = [self._hidden(share, random) for share in shares]
        return {"": [{name: side.to(self.device) for name, side in one.items()} for one in batches]}

    def _hidden(self, words: Tensor, random: torch.Generator) -> Batch:
        def draw(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=random, device=words.device)

        plain = (words >= self.low) & (words < self.high)
        places = (draw(*words.shape) + plain).topk(self.hidden, dim=1).indices
        labels, fate = words.gather(1, places), draw(*places.shape)
        other = (self.low + (self.high - self.low) * draw(*places.shape)).long()
        shown = torch.where(fate < 0.8, self.mask, torch.where(fate < 0.9, other, labels))
        return {"ids": words.scatter(1, places, shown), "places": places, "labels": labels}


class Photos(TaskSource):
    """Cats and dogs, every time changed at random.

    Args:
        place: See `Place`.
        batch: Photos per update.
        small: Discs and squares instead.
    """

    def __init__(self, place: Place, batch: int, small: bool) -> None:
        """Read the photos."""
        self.size = batch
        if small:
            sizes = {"train": 512, "valid": 128, "test": 256}
            drawn = {part: stand_in.shapes(count, at, 3, 64) for at, (part, count) in
                     enumerate(sizes.items())}  # fmt: skip
            self.sides = {part: Pictures(*pair) for part, pair in drawn.items()}
        else:
            task = cats_dogs(place.data)
            self.sides = {"train": task.train, "valid": task.valid, "test": task.test}

    def open(self, device: torch.device) -> None:
        """See `TaskSource`."""
        self.device, self.parts = device, {}
        for part, pictures in self.sides.items():
            photos = torch.from_numpy(pictures.images).to(device).permute(0, 3, 1, 2)
            labels = torch.from_numpy(pictures.labels.astype(np.int64)).to(device)
            shares = nn.functional.one_hot(labels, len(CLASSES)).float()
            self.parts[part] = (photos.contiguous(), shares)

    def host(self, method: str, frame: Frame) -> nn.Module:
        """See `TaskSource`."""
        return PhotoHost(method, frame, len(CLASSES))

    def batch(self, step: int) -> Batch:
        """See `TaskSource`."""
        random, (photos, shares) = self.random(step), self.parts["train"]
        chosen = torch.randint(len(photos), (self.size,), generator=random, device=self.device)
        seen = changed(photos[chosen].float() / 255, random)
        seen, mixed_shares = mixed(seen, shares[chosen], random)
        return {"photos": seen, "labels": mixed_shares}

    def tests(self, part: str) -> Tests:
        """See `TaskSource`; as they are."""
        photos, shares = self.parts[part]
        both = zip(photos.split(200), shares.split(200), strict=True)
        return {"": [{"photos": one.float() / 255, "labels": share} for one, share in both]}


def _windows(data: Path | None, length: int, vocabulary: int) -> Arrays:
    task = pretraining(vocabulary, data, length)
    assert isinstance(task.train, FreshlyHidden)
    code = task.train.code
    # Of valid and test as they are, what was hidden put back.
    whole = {
        part: np.where(side.labels >= 0, side.labels, side.ids).astype(np.uint16)
        for part, side in (("valid", task.valid), ("test", task.test))
    }
    numbers = np.array([code.vocabulary, code.mask, *code.plain])
    return {"train": task.train.ids.astype(np.uint16), **whole, "code": numbers}
