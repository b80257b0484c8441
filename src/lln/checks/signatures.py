"""Errors for calls that do not fit a signature; they say how to call the function instead.

Users of ``scaled_dot_product_attention`` and ``nn.MultiheadAttention`` pass arguments that linear
attention does not have, or has under another name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from lln.checks.names import did_you_mean
from lln.errors import UnexpectedArgumentError

P = ParamSpec("P")
R = TypeVar("R")

_NO_MATRIX = "the N×N matrix that it belongs to is never formed"
_CAUSAL = "is_causal=True for a causal mask"
_MASKS = f"use key_mask= (bool [B, S], True = attend) for padding and {_CAUSAL}"
_SCALE = (
    "alpha and beta replace it; to match softmax attention of another scale multiply query "
    "by scale * D**0.5"
)
_OPPOSITE = "which says the opposite: True = {}"

# Name of an argument of other attention functions → what to do instead.
_INSTEAD = {
    "attn_mask": f"{_NO_MATRIX}; {_MASKS}",
    "attn_bias": f"{_NO_MATRIX}; {_MASKS}",
    "need_weights": f"{_NO_MATRIX}; lln.reference.lln_matrix computes it for inspection",
    "key_padding_mask": f"give key_mask=~key_padding_mask, {_OPPOSITE.format('attend')}",
    "key_mask": f"give key_padding_mask=~key_mask, {_OPPOSITE.format('ignore')}",
    "scale": _SCALE,
    "softmax_scale": _SCALE,
    "add_bias_kv": "append a learned token to key and value instead",
    "add_zero_attn": "append a token of zeros to key and value instead",
}
_INSTEAD_PACKED = {
    name: f"{_NO_MATRIX}, and packed sequences carry no padding; use {_CAUSAL}"
    for name in ("attn_mask", "attn_bias")
} | {"key_padding_mask": "packed sequences carry no padding; drop those tokens before packing"}


def explain_misfits(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: arguments that the function does not take raise an error of one sentence.

    Arguments are inspected only after Python itself has refused the call.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            reason = why_misfit(function, args, kwargs)
            if reason is None:
                raise
        raise UnexpectedArgumentError(reason)

    # torch.compile limits recompilations per code object: a shared one would reach the limit.
    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return functools.update_wrapper(call, function)


def why_misfit(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """Why the arguments do not fit the function's signature; None if they do."""
    every = list(inspect.signature(function).parameters.values())
    name, parameters = function.__name__, _named(every)
    if parameters[0].name == "self":
        name, parameters, args = type(args[0]).__name__, parameters[1:], args[1:]
    ordered = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    takes = [one.name for one in parameters]
    unknown = [one for one in kwargs if one not in takes]
    # A function with **options checks them itself.
    if unknown and len(every) == len(_named(every)):
        return refusal(name, unknown[0], takes)
    if len(args) > len(ordered):
        surplus = args[len(ordered)]
        mask = "key_mask" in takes and "cu_seqlens" not in takes and isinstance(surplus, Tensor)
        fix = "; a mask of keys is key_mask=, bool [B, S], True = attend" if mask else ""
        return (
            f"{name} takes {_listed(ordered)} by position and all else by name, got "
            f"{type(surplus).__name__} after them{fix}."
        )
    given = ordered[: len(args)]
    twice = [one for one in given if one in kwargs]
    if twice:
        return f"{name} got {twice[0]} twice, by position and by name; give it once."
    missing = [
        one.name
        for one in parameters
        if one.default is one.empty and one.name not in (*given, *kwargs)
    ]
    return f"{name} needs {_listed(missing)}, which was not given." if missing else None


def check_options(
    owner: object, options: Iterable[str], *classes: type, without: Collection[str] = ()
) -> None:
    """Refuse options that no constructor of the classes or their bases takes.

    Args:
        owner: The object whose class the message names.
        options: The ``**options`` that its constructor passes on.
        classes: The classes that may take them.
        without: Arguments that the owner passes itself, so that users may not.

    Raises:
        UnexpectedArgumentError: With all arguments that are taken, or what to do instead.
    """
    bases = [base for one in classes for base in one.__mro__ if "__init__" in vars(base)]
    takes = dict.fromkeys(
        parameter.name
        for base in bases
        for parameter in _named(inspect.signature(base.__init__).parameters.values())
        if parameter.name not in ("self", *without)
    )
    for option in options:
        if option not in takes:
            raise UnexpectedArgumentError(refusal(type(owner).__name__, option, takes))


def refusal(name: str, argument: str, takes: Iterable[str]) -> str:
    """The sentence about an argument that something called ``name`` does not take."""
    takes = list(takes)
    instead = _INSTEAD_PACKED if "cu_seqlens" in takes else {}
    fix = instead.get(argument, _INSTEAD.get(argument))
    if fix is not None:
        return f"{name} has no {argument}: {fix}."
    return (
        f"{name} has no argument {argument!r}{did_you_mean(argument, takes)}; it takes "
        f"{', '.join(takes)}."
    )


def _named(parameters: Iterable[inspect.Parameter]) -> list[inspect.Parameter]:
    return [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
