"""Options of commands that take several names."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lln.checks.names import did_you_mean
from lln.errors import InvalidInputError


def check_choices(name: str, given: Iterable[str] | None, known: Collection[str]) -> None:
    """Refuse an option that takes several names if one of them is not allowed.

    Names are shown as they are typed on a command line, without quotes.

    Raises:
        InvalidInputError: With the names, and those that were probably meant.
    """
    unknown = [
        f"{one}{did_you_mean(one, known, quoted=False)}" for one in given or () if one not in known
    ]
    if unknown:
        raise InvalidInputError(
            f"{name} must be among {', '.join(known)}, got {', '.join(unknown)}."
        )
