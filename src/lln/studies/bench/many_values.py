"""Options that take several values: ``--lengths 512 1024`` or ``--lengths 512,1024``."""

from __future__ import annotations

from collections.abc import Sequence

from lln.errors import InvalidInputError

LISTS = ("--lengths", "--operations", "--passes", "--systems")


def join_lists(words: Sequence[str], commands: Sequence[str] = ()) -> list[str]:
    """Write the values of a list option as one word.

    Args:
        words: Of the command line.
        commands: Words that end a list because they are commands.

    Example:
        >>> join_lists(["--lengths", "512", "1024", "--resume"])
        ['--lengths', '512,1024', '--resume']
    """
    joined: list[str] = []
    values: list[str] | None = None
    for word in words:
        if values is not None and not word.startswith("-") and word not in commands:
            values.append(word)
            continue
        if values:
            joined.append(",".join(values))
        values = [] if word in LISTS else None
        joined.append(word)
    return [*joined, ",".join(values)] if values else joined


def split_names(text: str | None) -> list[str] | None:
    """The names in ``a,b``; None where nothing was given."""
    return None if text is None else [name for name in text.split(",") if name]


def split_numbers(option: str, text: str | None) -> list[int] | None:
    """The whole numbers in ``64,128``.

    Raises:
        InvalidInputError: If one of them is none.
    """
    names = split_names(text)
    if names is None:
        return None
    try:
        return [int(name) for name in names]
    except ValueError as error:
        raise InvalidInputError(
            f"{option} must be whole numbers, e.g. {option} 512 1024; got {text}."
        ) from error
