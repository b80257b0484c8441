"""Results on disk: whole after every case, whatever interrupts the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lln.errors import InvalidInputError
from lln.files import check_file, write_atomically
from lln.studies.bench.environment import IDENTITY, check_same

_FIXED = ("kind", "environment", "cases")


class Record:
    """A JSON file with the environment of a run and one row per case.

    Attributes:
        path: Where it lies.
        rows: What has been measured, in the order of measuring.
        extra: Further entries of the file.
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        environment: dict[str, Any],
        resume: bool = False,
        subject: dict[str, Any] | None = None,
    ) -> None:
        """Start a file, or go on with one.

        Args:
            path: Where to write; folders are made.
            kind: What the rows are about; rows of another kind are not gone on with.
            environment: As `lln.studies.bench.environment.describe` gives it.
            resume: Whether to keep the rows that are there.
            subject: Entries of the file that say what the rows are measured on; rows of another
                subject are not gone on with.

        Raises:
            InvalidInputError: If the file cannot be used.
        """
        self.path, self.kind, self.environment = path, kind, environment
        self.rows: list[dict[str, Any]] = []
        self.extra: dict[str, Any] = {}
        check_file(path, "--out")
        if resume and path.exists():
            self._load(subject or {})
        self.extra |= subject or {}
        self.save()

    def _load(self, subject: dict[str, Any]) -> None:
        try:
            stored = json.loads(self.path.read_text("utf-8"))
            rows, environment = list(stored["cases"]), dict(stored["environment"])
            if stored.get("kind") != self.kind:
                raise ValueError
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInputError(
                f"--resume cannot read {self.path}: it is no file of this command; "
                "leave --resume out to start anew."
            ) from error
        check_same(environment, {name: self.environment[name] for name in IDENTITY}, self.path)
        check_same(stored, subject, self.path)
        # What failed or was wrong may have been repaired since; what is too large stays so.
        self.rows = [row for row in rows if row.get("status") not in ("failed", "wrong")]
        self.extra = {k: v for k, v in stored.items() if k not in _FIXED}
        commands = [environment.get("command", ""), self.environment["command"]]
        self.environment = {
            **self.environment,
            "busy_cores": _busier(environment, self.environment),
            "command": "; ".join(dict.fromkeys(filter(None, commands))),
        }

    @property
    def done(self) -> set[str]:
        """Names of the cases that need no measuring any more."""
        return {row["name"] for row in self.rows}

    def add(self, row: dict[str, Any]) -> None:
        """Take in one row and save."""
        self.rows.append(row)
        self.save()

    @property
    def content(self) -> dict[str, Any]:
        """All that the file holds."""
        top = {"kind": self.kind, "environment": self.environment}
        return {**top, **self.extra, "cases": self.rows}

    def save(self) -> None:
        """Replace the file in one step: a reader or an interrupt never sees half of it."""
        write_atomically(self.path, json.dumps(self.content, indent=1) + "\n")


def _busier(*environments: dict[str, Any]) -> float | None:
    """What other programs kept busy during the worse part of a run that was resumed."""
    found = [each.get("busy_cores") for each in environments]
    return max((busy for busy in found if busy is not None), default=None)
