"""Answer the calls of ``scaled_dot_product_attention`` that any model's attention modules make.

A converted module gets a submodule ``lln`` and two hooks. Around its forward they let LLN attention
answer ``torch.nn.functional.scaled_dot_product_attention``; projections, norms and rotary
embeddings stay the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lln.checks.names import check_choice
from lln.errors import InvalidInputError, UnsupportedModelError
from lln.integrations.attached import ATTRIBUTE, AttachedHeads, attached_to, rebuild
from lln.integrations.attend import attend
from lln.integrations.attention_call import AttentionCall
from lln.integrations.conversion_report import Conversion, LayerReport, relative_change
from lln.integrations.fitted_layer import fit_layer
from lln.integrations.kept_softmax import softmax
from lln.integrations.settings import ATTENTIONS, Settings

Inputs = Tensor | dict[str, Tensor]


class AnsweredHeads(AttachedHeads):
    """`AttachedHeads` that answer the attention calls of the module they are attached to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `AttachedHeads`."""
        super().__init__(*args, **kwargs)
        self._modes: list[_Answer] = []

    def watch(self, module: nn.Module) -> None:
        """Answer the module's calls from now on."""
        module.register_forward_pre_hook(self.enter)
        module.register_forward_hook(self.leave, always_call=True)

    def enter(self, module: nn.Module, inputs: Any) -> None:
        """Before the module's forward."""
        mode = _Answer(lambda *args, **kwargs: self.answer(module, *args, **kwargs))
        mode.__enter__()
        self._modes.append(mode)

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
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
    return AttentionCall(
        module=module,
        attention=attention,
        settings=settings,
        heads=heads,
        query=query,
        key=key,
        value=value,
        mask=mask,
        is_causal=is_causal,
        dropout_p=dropout_p,
    )


def convert_calls(
    model: nn.Module,
    inputs: Inputs,
    attention: str,
    settings: Settings,
    *,
    layers: Sequence[int | str] | None = None,
    calibrated: bool = False,
) -> Conversion:
    """Convert every module of a model that calls ``scaled_dot_product_attention``.

    Args:
        model: In place.
        inputs: What the model is run on, a tensor or keyword arguments.
        attention: ``"lln"``, ``"lln_diag"`` or ``"lln_keys"``.
        settings: As `lln.integrations.convert.convert` makes them.
        layers: Numbers in the order they run, or names; None = all.
        calibrated: Whether α and β are found on ``inputs``.
    """
    check_choice("attention", attention, ATTENTIONS)
    if describe(model):
        raise InvalidInputError(f"{type(model).__name__} is converted already; load it anew.")
    seen: list[nn.Module] = []
    fitted: dict[int, AnsweredHeads] = {}
    report = Conversion(attention, settings.statistics)
    names = {id(module): name for name, module in model.named_modules()}

    def look(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        call = call_of(module, attention, settings, None, *args, **kwargs)
        out = softmax(call)
        if any(module is other for other in seen):
            return out
        number, name = len(seen), names[id(module)]
        seen.append(module)
        heads, width = call.query.shape[1], call.query.shape[3]
        if layers is not None and number not in layers and name not in layers:
            report.layers.append(LayerReport(name, "softmax", heads, width))
            return out
        own = AnsweredHeads(
            attention, heads, width, call.value.shape[3], settings, device=call.query.device
        )
        own.eval()
        report.layers.append(fit_layer(name, own, call, out, calibrated))
        fitted[id(module)] = own
        return out

    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            with callers_seen(model, look):
                expected = run(model, inputs)
            known = [*range(len(seen)), *(names[id(module)] for module in seen)]
            missing = [layer for layer in layers or [] if layer not in known]
            if not seen or missing:
                raise UnsupportedModelError(
                    f"{type(model).__name__} never calls scaled_dot_product_attention in "
                    f"{missing[0] if missing else 'any module'}; nothing was converted."
                )
            for module in seen:
                if id(module) in fitted:
                    attach(module, fitted[id(module)])
            report.moved = relative_change(run(model, inputs), expected)
    finally:
        model.train(training)
    return report


def attach(module: nn.Module, heads: AnsweredHeads) -> None:
    """Let a module's attention be answered by its own submodule."""
    heads.train(module.training)
    module.add_module(ATTRIBUTE, heads)
    heads.watch(module)


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
    for name, entry in described.items():
        module = model.get_submodule(name)
        heads = rebuild(entry["sizes"], Settings(**entry["settings"]), AnsweredHeads)
        if isinstance(heads, AnsweredHeads):
            attach(module, heads)


def run(model: nn.Module, inputs: Inputs) -> Tensor:
    """The model's first output."""
    outputs = model(inputs) if isinstance(inputs, Tensor) else model(**inputs)
    return outputs if isinstance(outputs, Tensor) else outputs[0]


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
