"""Files that a command will write: their places are looked at before long work."""

from __future__ import annotations

from pathlib import Path

from lln.errors import InvalidInputError
from lln.files import check_writable, kind_of


def check_file(path: Path, name: str) -> None:
    """Refuse a path where a file could not be written, before there is anything to write.

    Args:
        path: The file that will be written.
        name: The option or argument that gave it, such as ``--out``.

    Raises:
        InvalidInputError: One sentence.
    """
    kind = kind_of(path)
    if kind:
        raise InvalidInputError(
            f"{name} must name a file, got the {kind} {str(path)!r}; name a new file."
        )
    check_writable(path, path.parent, name)
