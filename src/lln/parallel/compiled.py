"""Which calls may be part of a compiled graph; the others stay outside.

All ranks must make the same collectives in the same order. Compilers do not know that: Inductor
leaves out one whose result is empty or not used on its rank, and orders those that do not depend on
each other as suits the sizes of its rank. Where all ranks hold equally many tokens, and all results
are used, they compile the same graph. Other calls run as if nothing had been compiled, and so do
their gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from lln.parallel.agreement import trusting
from lln.parallel.ranks import find_ranks
from lln.tracing import is_compiling

P = ParamSpec("P")
R = TypeVar("R")


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of an attention: compilers see only calls whose graph is the same on all ranks."""
    name, is_alike = function.__name__, cast("Callable[..., bool]", _is_alike)

    @torch.compiler.disable
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        # Other ranks may be inside their graph, where nothing is compared.
        with trusting():
            return function(*args, **kwargs)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_compiling() and not is_alike(name, *args, **kwargs):
            return outside(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        return function(*args, **kwargs)

    # As in `lln.checks.signatures.explain_misfits`.
    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return functools.update_wrapper(call, function)


def _is_alike(
    name: str,
    query: Tensor,
    *_sides: Tensor,
    group: Any = None,
    lengths: Sequence[int] | None = None,
    block_size: int | None = None,
    key_mask: Tensor | None = None,
    **_others: Any,
) -> bool:
    """Whether all ranks compile one graph, in which every collective has a use."""
    if find_ranks(group, f"lln.parallel.{name}").size == 1:
        return True
    if not lengths or any(one != query.shape[2] for one in lengths) or not query.shape[2]:
        return False
    if name == "lln_attention":
        return True
    size = query.shape[-1] if block_size is None else block_size
    # With a mask blocks may begin elsewhere than shards, and exact keys read numbers back.
    return name == "lln_diag_attention" and key_mask is None and lengths[0] % size == 0
