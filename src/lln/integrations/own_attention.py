"""Which models compute attention in their own layers, found in their code before one is built.

A class of transformers calls its attention through ``ALL_ATTENTION_FUNCTIONS`` or computes it in
its own layers, where a name like ``"lln"`` is ignored, fails as a key or breaks on a shape.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from torch import nn

from lln.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_INTERFACE = frozenset(("ALL_ATTENTION_FUNCTIONS", "get_interface"))


def refuse_own_attention(model: PreTrainedModel, attention: str) -> None:
    """Raise for a model whose layers would not call LLN attention.

    Args:
        model: As far as it is built; only its class and configuration count.
        attention: ``"lln"``, ``"lln_diag"`` or ``"lln_keys"``.
    """
    kind = type(model)
    if keeps_own_attention(kind):
        raise UnsupportedModelError(
            f"models of type {model.config.model_type!r} ({kind.__name__}) compute attention in "
            f"their own layers and not through transformers' attention interface, so that "
            f"{attention!r} cannot replace it; leave it as it is (attn_implementation='eager'), or "
            "choose another model, such as BERT, RoBERTa, ModernBERT, ViT, GPT-2 or Llama."
        )


@cache
def keeps_own_attention(kind: type[PreTrainedModel]) -> bool:
    """Whether the code around a class of models has attention layers, and none calls the interface.

    The files that define the class and those it inherits from are looked at, with the layers they
    import. A class without attention layers is made of other models, which are checked themselves.
    """
    from transformers import PreTrainedModel

    homes = [
        sys.modules[base.__module__]
        for base in kind.__mro__
        if issubclass(base, PreTrainedModel)
        and base is not PreTrainedModel
        and base.__module__ in sys.modules
    ]
    parts = [part for home in homes for part in vars(home).values()]
    layers = [
        part
        for part in parts
        if isinstance(part, type)
        and issubclass(part, nn.Module)
        and not issubclass(part, PreTrainedModel)
    ]
    if not any("Attention" in layer.__name__ for layer in layers):
        return False
    names = {home.__name__ for home in homes}
    functions = [
        part for part in parts if isinstance(part, FunctionType) and part.__module__ in names
    ]
    functions += [
        method
        for layer in layers
        for base in layer.__mro__
        if base not in (nn.Module, object)
        for method in vars(base).values()
        if isinstance(method, FunctionType)
    ]
    return not any(_calls_interface(function) for function in functions)


def _calls_interface(function: Any) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and any(_INTERFACE & {*part.co_names} for part in _codes(code))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of those defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
