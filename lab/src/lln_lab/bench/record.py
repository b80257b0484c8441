"""Results on disk: a complete file after every case, whatever interrupts the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lln.checks.reading import read_json
from lln.files import write_atomically
from lln_lab.bench.environment import IDENTITY, check_same
from lln_lab.new_files import check_file

_FIXED = ("kind", "environment", "cases")
_CONTENT = {"environment": {"command?": str, "busy_cores?": (float, None)}, "cases": [dict]}


class Record:
    """A JSON file with the environment of a run and one row per case.

    Attributes:
        path: The file.
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
        form: dict[str, Any] | None = None,
    ) -> None:
        """Start a file, or resume one.

        Args:
            path: Where to write; missing folders are created.
            kind: What the rows are about; a file of another kind is not resumed.
            environment: As `lln_lab.bench.environment.describe` returns it.
            resume: Whether to keep the rows of an existing file.
            subject: Entries of the file that say what was measured; a file with another subject is
                not resumed.
            form: Further parts of a file's schema (see `lln.checks.schema`), as of its cases.

        Raises:
            InvalidInputError: If the file cannot be used.
        """
        self.path, self.kind, self.environment = path, kind, environment
        self.form = form or {}
        self.rows: list[dict[str, Any]] = []
        self.extra: dict[str, Any] = {}
        check_file(path, "--out")
        if resume and path.exists():
            self._load(subject or {})
        self.extra |= subject or {}
        self.save()

    def _load(self, subject: dict[str, Any]) -> None:
        schema = _CONTENT | self.form | {"kind": frozenset([self.kind])}
        fix = "leave --resume out to start over"
        stored = read_json(self.path, schema, "a file of this command", fix)
        rows, environment = stored["cases"], stored["environment"]
        check_same(environment, {name: self.environment[name] for name in IDENTITY}, self.path)
        check_same(stored, subject, self.path)
        # Measure failed or wrong cases again, which may work now; too large ones stay too large.
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
        """Names of the cases that need not be measured again."""
        return {row["name"] for row in self.rows}

    def add(self, row: dict[str, Any]) -> None:
        """Add one row and save."""
        self.rows.append(row)
        self.save()

    @property
    def content(self) -> dict[str, Any]:
        """Everything in the file."""
        top = {"kind": self.kind, "environment": self.environment}
        return {**top, **self.extra, "cases": self.rows}

    def save(self) -> None:
        """Replace the file in one step: a reader or an interrupt never sees half of it."""
        write_atomically(self.path, json.dumps(self.content, indent=1) + "\n")


def _busier(*environments: dict[str, Any]) -> float | None:
    """The higher load by other programs among the parts of a resumed run."""
    found = [each.get("busy_cores") for each in environments]
    return max((busy for busy in found if busy is not None), default=None)
