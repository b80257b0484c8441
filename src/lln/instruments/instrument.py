"""One signature for all instruments: a function of prepared inputs, called with the arguments.

    @instrument(AttentionInputs)
    def entropy(inputs: AttentionInputs) -> Tensor:
        ...

is called as ``entropy(query, key, kind="lln", …)``. Editors, `inspect.signature` and `help` show
the arguments of `AttentionInputs`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Inputs = TypeVar("Inputs")
Result = TypeVar("Result")


def instrument(
    inputs: Callable[Arguments, Inputs],
) -> Callable[[Callable[[Inputs], Result]], Callable[Arguments, Result]]:
    """Let a function of ``inputs`` take the arguments that make them.

    Args:
        inputs: A dataclass; its docstring says in ``Args:`` what each argument is.
    """
    signature = inspect.signature(inputs)

    def decorate(measure: Callable[[Inputs], Result]) -> Callable[Arguments, Result]:
        @functools.wraps(measure)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                # Python would name the dataclass, which the caller does not know.
                raise TypeError(f"{measure.__name__}() {error}") from None
            return measure(inputs(*args, **kwargs))

        returned = inspect.signature(measure).return_annotation
        call.__dict__["__signature__"] = signature.replace(return_annotation=returned)
        call.__doc__ = _with_arguments(inspect.getdoc(measure) or "", inputs)
        return call

    return decorate


def _with_arguments(text: str, inputs: object) -> str:
    """A docstring with the ``Args:`` of the inputs and their bases before its ``Returns:``."""
    found = ""
    for one in reversed(getattr(inputs, "__mro__", ())):
        _, _, section = inspect.cleandoc(one.__doc__ or "").partition("Args:\n")
        found += section.partition("\n\n")[0].rstrip() + "\n" if section else ""
    return text.replace("Returns:\n", f"Args:\n{found}\nReturns:\n", 1)
