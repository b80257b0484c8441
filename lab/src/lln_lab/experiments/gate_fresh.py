"""Tasks of the gates whose examples are drawn while they are trained on.

See `lln_lab.experiments.gate_data`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from lln_lab.experiments.captured import Batch
from lln_lab.experiments.gate_data import Place, TaskSource, Tests
from lln_lab.experiments.gate_hosts import Frame, PathHost, TreeHost
from lln_lab.experiments.tasks import listops, pathfinder
from lln_lab.experiments.tasks.made_ahead import Arrays, Key, MadeAhead

# Numbers of the files of Pathfinder that no step trains on.
PARTS = {-2: "valid", -1: "test"}


class Fresh(TaskSource):
    """Examples that are drawn and never, or seldom, seen again, from files made ahead.

    A subclass says which `pieces` of which files a step takes.
    """

    def __init__(self, folder: str, make: partial[Arrays], place: Place) -> None:
        """Keep where the files are."""
        self.files = MadeAhead(place.work / "data" / folder, make, place.workers)
        self.recent: dict[Key, Batch] = {}

    @abstractmethod
    def pieces(self, step: int) -> list[tuple[Key, int, int]]:
        """Files, and the first and the last row (not included) to take of each."""

    def begin(self, first: int, last: int) -> None:
        """See `TaskSource`."""
        needed = (key for step in range(first, last) for key, _, _ in self.pieces(step))
        self.files.begin(dict.fromkeys(needed))

    def close(self) -> None:
        """See `TaskSource`."""
        self.files.close()

    def open(self, device: torch.device) -> None:
        """See `TaskSource`."""
        self.device = device

    def rows(self, step: int) -> Batch:
        """All pieces of a step, one after the other."""
        taken = [
            {name: side[first:last] for name, side in self._file(key).items()}
            for key, first, last in self.pieces(step)
        ]
        return {name: torch.cat([one[name] for one in taken]) for name in taken[0]}

    def _file(self, key: Key) -> Batch:
        if key not in self.recent:
            for old in list(self.recent)[:-8]:
                del self.recent[old]
            self.recent[key] = self.on_device(self.files[key])
        return self.recent[key]


class Trees(Fresh):
    """ListOps with fresh trees, shallow ones first.

    Args:
        place: See `Place`.
        batch: Trees per update.
        length: The most tokens.
        stages: Steps, and the depths that these have as many trees of each; the last has all.
        tested: Trees of every depth in the test part.
    """

    FILE = 8192

    def __init__(
        self,
        place: Place,
        batch: int,
        length: int,
        stages: tuple[tuple[int, tuple[int, ...]], ...],
        tested: int,
    ) -> None:
        """Keep the settings."""
        self.size, self.length, self.stages, self.tested = batch, length, stages, tested
        super().__init__(f"trees-{length}", partial(_trees, length, self.FILE), place)

    def pieces(self, step: int) -> list[tuple[Key, int, int]]:
        """See `Fresh`."""
        for steps, depths in self.stages:
            if step < steps:
                number, first = divmod(step * self.size, self.FILE)
                return [((number, *depths), first, first + self.size)]
            step -= steps
        raise ValueError("there are no more steps")

    def host(self, method: str, frame: Frame) -> nn.Module:
        """See `TaskSource`."""
        return TreeHost(method, frame, listops.CLOSE + 1, 10)

    def batch(self, step: int) -> Batch:
        """See `TaskSource`."""
        rows = self.rows(step)
        return {"ids": rows["ids"].long(), "labels": rows["labels"].long()}

    def test_trees(self, part: str) -> Arrays:
        """Trees that no training sees, as many of every depth."""
        depths = self.stages[-1][1]
        return listops.fresh_trees(
            0 if part == "test" else 1, depths, len(depths) * self.tested, self.length, test=True
        )

    def tests(self, part: str) -> Tests:
        """See `TaskSource`."""
        arrays = self.test_trees(part)
        return {
            f"depth {depth}": _split(
                self.on_device({name: arrays[name][arrays["depths"] == depth].astype(np.int64)
                                for name in ("ids", "labels")})
            )
            for depth in self.stages[-1][1]
        }  # fmt: skip


class Paths(Fresh):
    """Pathfinder with short paths first, every picture mirrored and turned at random.

    Args:
        place: See `Place`.
        batch: Pictures per update.
        stages: Steps, the dashes of a path that these have as many pictures of each, and whether
            the steps paint covered squares instead of telling classes apart.
        files: Files of `FILE` pictures for every number of dashes; then they are seen again.
        patch: Pixels of a token in both directions.
        tested: Pictures of every number of dashes in the test part; valid has a quarter.
    """

    FILE = 4800
    # Pixels of a side of the squares that are covered, and their share.
    COVER, SHARE = 4, 0.4

    def __init__(
        self,
        place: Place,
        batch: int,
        stages: tuple[tuple[int, tuple[int, ...], bool], ...],
        files: int,
        patch: int,
        tested: int,
    ) -> None:
        """Keep the settings."""
        self.size, self.stages, self.patch = batch, stages, patch
        self.count = files * self.FILE
        super().__init__(f"paths-{tested}", partial(_paths, self.FILE, tested), place)

    def pieces(self, step: int) -> list[tuple[Key, int, int]]:
        """See `Fresh`."""
        taken: dict[int, int] = {}
        for steps, lengths, _ in self.stages:
            each = self.size // len(lengths)
            for length in lengths:
                taken[length] = taken.get(length, 0) + min(step, steps) * each
            if step < steps:
                break
            step -= steps
        found = []
        for length in lengths:
            first, left = taken[length] % self.count, each
            while left:
                number, row = divmod(first, self.FILE)
                last = min(row + left, self.FILE)
                found.append(((length, number), row, last))
                left -= last - row
                first = (first + last - row) % self.count
        return found

    def begin(self, first: int, last: int) -> None:
        """See `TaskSource`; parts that no step trains on come before all others."""
        tests = [(length, part) for part in PARTS for length in self.stages[-1][1]]
        needed = (key for step in range(first, last) for key, _, _ in self.pieces(step))
        self.files.begin(dict.fromkeys([*tests, *needed]))

    def host(self, method: str, frame: Frame) -> nn.Module:
        """See `TaskSource`."""
        return PathHost(method, frame, self.patch)

    def batch(self, step: int) -> Batch:
        """See `TaskSource`."""
        rows, random = self.rows(step), self.random(step)
        pixels = rows["pixels"].float() / 255
        flips = torch.rand(3, len(pixels), 1, 1, generator=random, device=self.device) < 0.5
        for flip, turned in zip(flips, (lambda one: one.flip(1), lambda one: one.flip(2), _across),
                                strict=True):  # fmt: skip
            pixels = torch.where(flip, turned(pixels), pixels)
        if not self._paints(step):
            return {"pixels": pixels, "labels": rows["labels"].long()}
        squares = pixels.shape[1] // self.COVER
        places = torch.rand(len(pixels), squares, squares, generator=random, device=self.device)
        covered = (places < self.SHARE).float()
        for axis in (1, 2):
            covered = covered.repeat_interleave(self.COVER, axis)
        return {"pixels": pixels, "covered": covered}

    def tests(self, part: str) -> Tests:
        """See `TaskSource`."""
        batches = {}
        number = next(key for key, name in PARTS.items() if name == part)
        for length in self.stages[-1][1]:
            both = self.on_device(self.files[length, number])
            whole = {"pixels": both["pixels"].float() / 255, "labels": both["labels"].long()}
            batches[f"{length} dashes"] = _split(whole)
        return batches

    def _paints(self, step: int) -> bool:
        for steps, _, paints in self.stages:
            if step < steps:
                return paints
            step -= steps
        return False


def _trees(length: int, count: int, key: Key) -> Arrays:
    number, *depths = key
    return listops.fresh_trees(number, tuple(depths), count, length)


def _paths(count: int, tested: int, key: Key) -> Arrays:
    length, number = key
    if number in PARTS:
        asked = tested if PARTS[number] == "test" else tested // 4
        pixels, labels = pathfinder.images(asked, 0, PARTS[number], length)
    else:
        pixels, labels = pathfinder.images(count, 0, "train", length, first=number * count)
    return {"pixels": pixels, "labels": labels}


def _across(pixels: Tensor) -> Tensor:
    return pixels.mT


def _split(batch: Batch, size: int = 250) -> list[Batch]:
    names = list(batch)
    shares: Iterable[tuple[Tensor, ...]] = zip(
        *(side.split(size) for side in batch.values()), strict=True
    )
    return [dict(zip(names, share, strict=True)) for share in shares]
