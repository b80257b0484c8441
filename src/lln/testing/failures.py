"""Unexpected exceptions, described in one line."""

from __future__ import annotations


def in_one_line(error: BaseException) -> str:
    r"""The kind of an exception, and the first line of what caused it.

    Compilers put pages of source into their messages, and the reason into the exception's cause.

    Example:
        >>> in_one_line(RuntimeError("no compiler\nand pages more"))
        'RuntimeError: no compiler'
    """
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    lines = str(root).strip().splitlines() or [type(root).__name__]
    return f"{type(error).__name__}: {lines[0]}"
