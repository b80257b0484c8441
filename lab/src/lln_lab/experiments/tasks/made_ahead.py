"""Arrays in files that are made once, by worker processes ahead of the trainings that read them.

Trainings that run side by side read the same files: whoever comes first makes one, the others wait
for it. A file depends on its name alone, never on when or by whom it was made.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from multiprocessing.pool import AsyncResult, Pool
from pathlib import Path

import numpy as np

from lln.files import replacing

Arrays = dict[str, np.ndarray]
Key = tuple[int, ...]


def kept(path: Path, make: Callable[[], Arrays]) -> Arrays:
    """The arrays of a file; made first if it is not there, by one process only."""
    ensure(path, make)
    with np.load(path) as arrays:
        return dict(arrays)


def ensure(path: Path, make: Callable[[], Arrays], wait: bool = True) -> None:
    """Make a file if it is not there; while another process does so wait for it, or leave it."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        try:
            # The system unlocks, however this process ends.
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if not path.exists():
            with replacing(path) as file:
                np.savez(file, **make())


class MadeAhead:
    """Files by key that are read one after the other while workers make the next ones.

    Args:
        folder: Where they are kept; its name has to say what they hold.
        make: Makes the file of a key.
        workers: Processes; 0 = a file is made when it is asked for.
    """

    def __init__(self, folder: Path, make: Callable[[Key], Arrays], workers: int) -> None:
        """Start nothing; see `begin`."""
        self.folder, self.make, self.workers = folder, make, workers
        self.pool: Pool | None = None
        self.asked: dict[Key, AsyncResult[None]] = {}

    def begin(self, keys: Iterable[Key]) -> None:
        """Let workers make these files, in this order.

        Before CUDA is used: workers are copies of this process.
        """
        if self.workers:
            self.pool = get_context("fork").Pool(self.workers, initializer=os.nice, initargs=(10,))
            for key in keys:
                self.asked[key] = self.pool.apply_async(_make, (self._path(key), self.make, key))

    def __getitem__(self, key: Key) -> Arrays:
        """A file; waits until it is made."""
        if key in self.asked:
            self.asked.pop(key).get()
        return kept(self._path(key), lambda: self.make(key))

    def close(self) -> None:
        """End the workers; what they have not finished is not there."""
        if self.pool is not None:
            self.pool.terminate()

    def _path(self, key: Key) -> Path:
        return self.folder / f"{'-'.join(map(str, key))}.npz"


def _make(path: Path, make: Callable[[Key], Arrays], key: Key) -> None:
    # What others are at is left to them: all workers together go on with the next files.
    ensure(path, lambda: make(key), wait=False)
