"""Checks of arguments that take one of several names; errors suggest the name that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from lln.errors import InvalidInputError


def check_choice(name: str, given: object, known: Collection[str | None]) -> None:
    """Refuse an argument that is not one of the names it may have, or None if that is among them.

    Example:
        >>> check_choice("matching", "varience", ("variance", "entropy", "paper"))
        Traceback (most recent call last):
        ...
        lln.errors.InvalidInputError: matching must be one of 'variance', 'entropy', 'paper', got
        'varience' (did you mean 'variance'?).
    """
    # Only strings and None are looked up: arrays compare by entry, and lists are not hashable.
    if (given is None or isinstance(given, str)) and given in known:
        return
    few = len(known) < 3
    listed = (" or " if few else ", ").join(map(repr, known))
    raise InvalidInputError(
        f"{name} must be {'' if few else 'one of '}{listed}, got {shown(given)}"
        f"{did_you_mean(given, known)}."
    )


def did_you_mean(given: object, known: Iterable[str | None], *, quoted: bool = True) -> str:
    """What to add after an unknown name; empty if no known name is close to it.

    >>> did_you_mean("LLN-Dag", ("softmax", "lln", "lln_diag"))
    " (did you mean 'lln_diag'?)"
    """
    if not isinstance(given, str):
        return ""
    folded = {_fold(name): name for name in known if name is not None}
    found = difflib.get_close_matches(_fold(given), folded, 1)
    if not found:
        return ""
    meant = folded[found[0]]
    return f" (did you mean {repr(meant) if quoted else meant}?)"


def shown(given: object) -> str:
    """A name or number as it was given; for anything else its type, to keep messages short."""
    plain = given is None or isinstance(given, str | int | float)
    return repr(given) if plain else type(given).__name__


def _fold(name: str) -> str:
    return name.lower().replace("-", "_")
