"""The options of a class, and the sentences with which systems refuse one."""

import inspect
import math
from collections.abc import Callable
from numbers import Real

from lln.checks import check_count
from lln.checks.names import shown
from lln.errors import InvalidInputError


def keywords_of(system: type) -> dict[str, inspect.Parameter]:
    """The options of a class; where it hands on ``**`` others, those of its base too."""
    found: dict[str, inspect.Parameter] = {}
    for one in system.__mro__:
        if "__init__" in vars(one):
            parameters = inspect.signature(vars(one)["__init__"]).parameters.values()
            for each in parameters:
                if each.kind is each.KEYWORD_ONLY:
                    found.setdefault(each.name, each)
            if all(each.kind is not each.VAR_KEYWORD for each in parameters):
                break
    return found


def check_size(name: str, size: object) -> None:
    """Refuse what no layer can have as a size."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise InvalidInputError(f"{name} must be a positive whole number, got {shown(size)}.")


def check_counts(least: int = 1, /, **counts: int) -> None:
    """Refuse options that are not whole numbers of at least ``least``."""
    for name, count in counts.items():
        check_count(name, count, least)


def check_number(name: str, value: float, fits: Callable[[float], bool], wanted: str) -> None:
    """Refuse an option that is no finite number, or not the ``wanted`` one."""
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not (is_number and fits(value)):
        raise InvalidInputError(f"{name} must be {wanted}, got {value!r}.")


def check_window(window: int) -> None:
    """Refuse a window that does not reach equally far to both sides."""
    check_count("window", window, least=2)
    if window % 2:
        raise InvalidInputError(
            f"window must be even, half of it on each side of a token, got {window}."
        )


def check_kernel(name: str, kernel: int) -> None:
    """Refuse a number of tokens under a convolution that has no middle; 0 = no convolution."""
    check_count(name, kernel, least=0)
    if kernel and kernel % 2 == 0:
        raise InvalidInputError(f"{name} must be an odd number of tokens or 0, got {kernel}.")
