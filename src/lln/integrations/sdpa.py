"""Answer the calls of ``scaled_dot_product_attention`` that any model's attention modules make.

A converted module gets a submodule ``lln`` and two hooks. Around its forward they let LLN attention
answer ``torch.nn.functional.scaled_dot_product_attention``; projections, norms and rotary
embeddings stay the model's own. `lln.integrations.call_surgeon` converts whole models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lln.checks.schema import fault
from lln.errors import InvalidInputError, UnsupportedModelError
from lln.integrations.attached import AttachedHeads, KeptSoftmax, attached_to, rebuild
from lln.integrations.attached import attach as attach_heads
from lln.integrations.attend import attend
from lln.integrations.attention_call import AttentionCall
from lln.integrations.settings import Settings, check_sizes


class AnsweredHeads(AttachedHeads):
    """`AttachedHeads` that answer the attention calls of the module they are attached to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `AttachedHeads`."""
        super().__init__(*args, **kwargs)
        self._modes: list[_Answer] = []

    def enter(self, module: nn.Module) -> None:
        """Before the module's forward."""
        mode = _Answer(lambda *args, **kwargs: self.answer(module, *args, **kwargs))
        mode.__enter__()
        self._modes.append(mode)

    def leave(self) -> None:
        """After it, also if it failed."""
        self._modes.pop().__exit__(None, None, None)

    def answer(self, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """LLN attention instead of softmax."""
        return attend(call_of(module, self.attention, self.settings, self, *args, **kwargs))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what a forward under way has open."""
        return {**super().__getstate__(), "_modes": []}


class _Answer(TorchFunctionMode):
    """Hands calls of scaled_dot_product_attention to a function."""

    def __init__(self, answer: Callable[..., Tensor]) -> None:
        super().__init__()
        self.answer = answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self.answer(*args, **kwargs)
        return func(*args, **kwargs)


def call_of(
    module: nn.Module,
    attention: str,
    settings: Settings,
    heads: AttachedHeads | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """The arguments of ``scaled_dot_product_attention`` as a call of ours."""
    mask = None
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool or attn_mask.dim() != 4 or attn_mask.shape[1:3] != (1, 1):
            raise UnsupportedModelError(
                f"{type(module).__name__} passes attn_mask of shape {list(attn_mask.shape)} and "
                f"{attn_mask.dtype}: a mask or bias of pairs, which linear attention cannot apply; "
                "a bool mask [B, 1, 1, S] of keys it can."
            )
        mask = attn_mask[:, 0, 0].expand(query.shape[0], -1)
    if scale is not None:
        query = query * (scale * query.shape[-1] ** 0.5)
    sides, options = (query, key, value), {"is_causal": is_causal, "dropout_p": dropout_p}
    return AttentionCall(module, attention, settings, heads, *sides, mask=mask, **options)


def attach(module: nn.Module, attached: AttachedHeads | KeptSoftmax) -> list[RemovableHandle]:
    """Let a module's attention be answered by its own submodule, in place of an earlier one.

    Returns:
        The hooks that do so, to undo it; none if the module had them already.
    """
    is_watched = attached_to(module) is not None
    attach_heads(module, attached)
    attached.train(module.training)
    if is_watched:
        return []
    return [
        module.register_forward_pre_hook(_enter),
        module.register_forward_hook(_leave, always_call=True),
    ]


def _enter(module: nn.Module, inputs: Any) -> None:
    # Looked up in every call, so that a copy of the module asks its own submodule.
    heads = attached_to(module)
    if isinstance(heads, AnsweredHeads):
        heads.enter(module)


def _leave(module: nn.Module, inputs: Any, output: Any) -> None:
    heads = attached_to(module)
    if isinstance(heads, AnsweredHeads):
        heads.leave()


def describe(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What to save beside a converted model's state dict, as JSON if you like."""
    return {
        name: {"sizes": heads.sizes(), "settings": heads.settings.as_dict()}
        for name, module in model.named_modules()
        if isinstance(heads := attached_to(module), AnsweredHeads)
    }


def attach_described(model: nn.Module, described: dict[str, dict[str, Any]]) -> None:
    """Prepare a fresh model for the state dict of a converted one.

    Args:
        model: As it was before `convert`.
        described: From `describe`.
    """
    found = fault(described, {str: {"sizes": dict, "settings": dict}})
    if found is not None:
        raise InvalidInputError(f"this is not what describe(model) gives: {found}.")
    modules = dict(model.named_modules())
    for name, entry in described.items():
        if name not in modules:
            raise InvalidInputError(
                f"the model has no module {name!r}, which was converted: make it as the one that "
                "was described."
            )
        check_sizes(name, entry["sizes"])
        settings = Settings.of(SimpleNamespace(lln=entry["settings"]))
        heads = rebuild(entry["sizes"], settings, AnsweredHeads)
        if isinstance(heads, AnsweredHeads):
            attach(modules[name], heads)


@contextmanager
def callers_seen(model: nn.Module, answer: Callable[..., Tensor]) -> Iterator[None]:
    """Answer every call of attention with the module that makes it as the first argument."""
    running: list[nn.Module] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        running.append(module)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        running.pop()

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        with _Answer(lambda *args, **kwargs: answer(running[-1], *args, **kwargs)):
            yield
    finally:
        for handle in handles:
            handle.remove()
