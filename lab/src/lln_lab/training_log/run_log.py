"""A run's measurements on disk: JSON lines that survive an interruption, and TensorBoard events."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lln.checks.reading import parsed_json
from lln.errors import BackendUnavailableError, InvalidInputError
from lln.files import write_atomically, writing
from lln.instruments.measurements import json_ready

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LINES = "concentration.jsonl"
_RECORD = {"step": int}


class RunLog:
    """One record per logged step, appended as it happens.

    Args:
        out: Folder; the records go to ``concentration.jsonl`` in it, events for TensorBoard to
            ``tensorboard/``.
        resume_from: Updates done before this run, when it goes on from a checkpoint; records of
            later updates, from a run that was cut off, are replaced. None = a new run.
        tensorboard: Whether to write events; None = if TensorBoard is installed.

    Raises:
        InvalidInputError: If the folder cannot be used, or holds records and ``resume_from`` is
            not given.
        BackendUnavailableError: If TensorBoard was asked for and is not installed.
    """

    def __init__(
        self, out: str | Path, *, resume_from: int | None = None, tensorboard: bool | None = None
    ) -> None:
        """Read the records that are there and drop those that will be written again."""
        self.folder = Path(out)
        self.path = self.folder / LINES
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInputError(
                f"out {str(out)!r} cannot be used: {error.strerror or error}."
            ) from error
        if not os.access(self.folder, os.W_OK):
            raise InvalidInputError(f"out {str(out)!r} cannot be written.")
        kept = _go_on(self.path, resume_from)
        self._writer = _open_tensorboard(self.folder / "tensorboard", kept, tensorboard)
        # Without a buffer: after a full disk nothing waits in it to be written again.
        self._file = self.path.open("ab", buffering=0)

    def write(self, record: dict[str, Any], scalars: Mapping[str, float]) -> None:
        """Append a record with its ``step``; ``scalars`` are TensorBoard's curves.

        Raises:
            WriteError: If the disk is full; the file then ends with the record before.
        """
        line = json.dumps(json_ready(record), ensure_ascii=False, allow_nan=False)
        with writing(self.path, "the records before are kept"):
            self._append(f"{line}\n".encode())
            self._add_scalars(record["step"], scalars)

    def _append(self, line: bytes) -> None:
        before = os.fstat(self._file.fileno()).st_size
        try:
            left = line
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            # Half a record would make one line with the next.
            with suppress(OSError):
                self._file.truncate(before)
            raise

    def _add_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._writer is not None:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> RunLog:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self.close()


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The records of a file, or of the file in a folder; a last line cut short is left out.

    Raises:
        InvalidInputError: If another line is no record.
    """
    path = Path(path)
    path = path / LINES if path.is_dir() else path
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InvalidInputError(
            f"{str(path)!r} cannot be read: {error.strerror or error}; name the folder of a run."
        ) from error
    fix = "move the file away, or log to another folder"
    # Every whole line ends in a newline, so what follows the last one was being written.
    return [
        parsed_json(line, _RECORD, f"line {number} of {str(path)!r} is not a record of a run", fix)
        for number, line in enumerate(lines[:-1], 1)
    ]


def _go_on(path: Path, resume_from: int | None) -> int | None:
    """Drop records that will be written again; returns the last step kept, if there is one."""
    if not path.exists():
        return None
    records = read_records(path)
    if records and resume_from is None:
        raise InvalidInputError(
            f"{str(path)!r} already holds records up to step {records[-1]['step']}; pass "
            "resume_from=STEP to go on after that step (0 starts over), or log to another folder."
        )
    kept = [record for record in records if record["step"] <= (resume_from or 0)]
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
    write_atomically(path, "".join(lines))
    return kept[-1]["step"] if kept else None


def _open_tensorboard(
    folder: Path, last_step: int | None, wanted: bool | None
) -> SummaryWriter | None:
    if wanted is False:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        if wanted is None:
            return None
        raise BackendUnavailableError(
            "TensorBoard is not installed; run pip install 'lln-lab[tensorboard]', or pass "
            "tensorboard=False."
        ) from error
    # TensorBoard hides the events of steps that will be written again.
    return SummaryWriter(str(folder), purge_step=1 if last_step is None else last_step + 1)
