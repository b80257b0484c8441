"""Cells measured in a separate process, so that none of them can end the run.

After an illegal access a process cannot use its GPU any more, a kernel may never return, and a
machine out of memory kills processes: then the cell fails, and the next one gets a new process.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from lln_lab.bench.peers_cells import PeerCell
from lln_lab.bench.result_rows import Row, row_of

# Time limit of a cell in seconds: far more than drawing, compiling and timing take.
PATIENCE = 45.0


class Worker:
    """Calls ``measure(cell, *arguments)`` in another process; a context manager that ends it."""

    def __init__(
        self, measure: Callable[..., Row], arguments: tuple[Any, ...], patience: float = PATIENCE
    ) -> None:
        """The process starts with the first cell.

        Args:
            measure: A module-level function, which the other process imports.
            arguments: Its arguments after the cell.
            patience: Seconds that a cell may take.
        """
        self._measure, self._arguments, self.patience = measure, arguments, patience
        # A forked process could not use the GPU.
        self._context = multiprocessing.get_context("spawn")
        self._process: Any = None
        self._pipe: Any = None

    def __enter__(self) -> Worker:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self._end()

    def __call__(self, cell: PeerCell) -> Row:
        """The row of a cell; ``fatal`` is set if the cell ended the process."""
        process = self._process or self._start()
        try:
            self._pipe.send(cell)
            if self._pipe.poll(self.patience):
                row, is_usable = self._pipe.recv()
                if not is_usable:
                    self._end()
                    row["fatal"] = True
                return row
            reason = f"no answer after {self.patience:g} s"
        except (EOFError, OSError):
            process.join(1.0)
            reason = f"the process ended with {process.exitcode}"
        self._end()
        return row_of(cell, status="failed", reason=reason, fatal=True)

    def _start(self) -> Any:
        self._pipe, theirs = self._context.Pipe()
        arguments = (theirs, self._measure, self._arguments, torch.get_num_threads())
        self._process = self._context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        # Wait until torch is imported, so that it does not count as time of the first cell.
        with suppress(EOFError, OSError):
            self._pipe.recv()
        return self._process

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._process = None


def _serve(
    pipe: Connection, measure: Callable[..., Row], arguments: tuple[Any, ...], threads: int
) -> None:
    # Ignored here: Ctrl-C reaches both processes, and the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    pipe.send(None)
    while True:
        try:
            cell = pipe.recv()
        except EOFError:
            return
        row = measure(cell, *arguments)
        pipe.send((row, row["status"] != "failed" or _is_usable()))


def _is_usable() -> bool:
    """Whether this process can still use its GPU."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
