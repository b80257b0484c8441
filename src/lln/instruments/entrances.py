"""The functions through which models call attention, each with a wrapper that reports the call.

A wrapper calls the original first. If a function further inside reported the call (for example
``scaled_dot_product_attention``, called by a function of Hugging Face), the outer wrapper reports
nothing: the inner one knows more.

Dimension legend: B batch, H query heads, T queries, S keys, D head width, W model width.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln.checks.call import Call
from lln.instruments.interception import Patch, Sighting, inside, listening, sight, sighted
from lln.precision import cast_for_autocast

LOOKED_FOR = (
    "the functions and modules of lln",
    "torch.nn.functional.scaled_dot_product_attention",
    "torch.nn.MultiheadAttention with nn.TransformerEncoder",
    "Hugging Face's attention interface",
)

# Arguments of Hugging Face's functions that change the scores in ways no mask expresses.
_SCORE_CHANGES = ("softcap", "position_bias", "s_aux", "sinks")

_ORIGINAL_SDPA = F.scaled_dot_product_attention


class _ProjectedError(Exception):
    """Ends a second run of ``multi_head_attention_forward`` as soon as it has projected."""


class _SecondRun(threading.local):
    active = False


_second_run = _SecondRun()


def patches_for(model: nn.Module) -> list[Patch]:
    """What to replace so that every attention call of the model is seen."""
    current = F.scaled_dot_product_attention
    sdpa = {id(current), id(_ORIGINAL_SDPA), id(_watch_sdpa(_ORIGINAL_SDPA))}
    # A file may have imported the function by name, and a module may hold it as an attribute.
    files = {type(module).__module__ for module in model.modules()} - {F.__name__}
    holders = [*(sys.modules[name] for name in files if name in sys.modules), *model.modules()]
    patches = [
        Patch(holder, name, _watch_sdpa)
        for holder in holders
        for name, item in tuple(vars(holder).items())
        if id(item) in sdpa
    ]
    patches += [
        Patch(F, "scaled_dot_product_attention", _watch_sdpa),
        Patch(F, "multi_head_attention_forward", _watch_multi_head),
        Patch(torch, "_native_multi_head_attention", _watch_native_multi_head),
        Patch(torch, "_transformer_encoder_layer_fwd", _watch_encoder_layer),
    ]
    # A Hugging Face model exists only where the library is loaded, so it need not be imported.
    library = sys.modules.get("transformers.modeling_utils")
    if library is not None:
        patches.append(Patch(library.AttentionInterface, "get_interface", _watch_get_interface))
    return patches


def _watched(original: Callable[..., Any], see: Callable[..., None]) -> Callable[..., Any]:
    """The original, which shows its arguments unless a call inside of it was seen."""

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        before = sighted()
        out = original(*args, **kwargs)
        if listening() and sighted() == before:
            see(*args, **kwargs)
        return out

    return watched


@functools.cache
def _watch_sdpa(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def unless_projected(*args: Any, **kwargs: Any) -> Tensor:
        if _second_run.active:
            _see_sdpa(*args, **kwargs)
            raise _ProjectedError
        return original(*args, **kwargs)

    return _watched(unless_projected, _see_sdpa)


def _see_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    problem = "" if not query.is_nested else "queries are a nested tensor, which cannot be read"
    if not problem:
        query, key = cast_for_autocast(query, key)
        query, key, attn_mask = _four_axes(query, key, attn_mask)
    call = Call("softmax", query, key, key, scale=scale, is_causal=is_causal)
    sight(Sighting(call, pair_mask=attn_mask, problem=problem))


def _four_axes(
    query: Tensor, key: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``[B, H, T, D]`` from any number of leading axes."""
    if query.dim() == 4 and query.shape[0] == key.shape[0]:
        return query, key, mask
    lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3])
    if query.dim() > 4 and mask is not None:
        mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, -4)
    query, key = (t.expand(*lead, *t.shape[-3:]) for t in (query, key))
    if query.dim() < 4:
        if query.dim() == 3:
            # [B, T, D]: the heads are in the batch, or there is one.
            query, key = query.unsqueeze(1), key.unsqueeze(1)
            mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
        else:
            query, key = query[None, None], key[None, None]
        return query, key, mask
    return query.flatten(0, -4), key.flatten(0, -4), mask


@functools.cache
def _watch_multi_head(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def see(*args: Any, **kwargs: Any) -> None:
        # To return the weights it took a path that cannot be seen. Run the visible path again, up
        # to the attention. The mask says what is_causal only hints at.
        again = signature.bind(*args, **kwargs)
        again.arguments |= {"need_weights": False, "training": False, "is_causal": False}
        _second_run.active = True
        try:
            with torch.no_grad(), suppress(_ProjectedError):
                original(*again.args, **again.kwargs)
        finally:
            _second_run.active = False

    return _watched(original, see)


@functools.cache
def _watch_native_multi_head(original: Callable[..., Any]) -> Callable[..., Any]:
    def see(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> None:
        _see_projection(query, key, *args, **kwargs)

    return _watched(original, see)


@functools.cache
def _watch_encoder_layer(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @torch.no_grad()
    def see(hidden: Tensor, *args: Any) -> None:
        width, heads, weight, bias = args[:4]
        norm_first, eps, norm_weight, norm_bias = args[7:11]
        if norm_first:
            hidden = F.layer_norm(hidden, (width,), norm_weight, norm_bias, eps)
        masks = {"mask": args[17], "mask_type": args[18]}
        _see_projection(hidden, hidden, width, heads, weight, bias, **masks)

    return _watched(original, see)


@torch.no_grad()
def _see_projection(
    query: Tensor,
    key: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor | None = None,
    proj_bias: Tensor | None = None,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> None:
    """Project ``[B, T, W]`` as the fused kernels do inside, and report that."""
    key_mask = None
    if query.is_nested:
        lengths = torch.tensor([part.shape[0] for part in query.unbind()], device=query.device)
        query, key = (side.to_padded_tensor(0.0) for side in (query, key))
        key_mask = torch.arange(key.shape[1], device=key.device) < lengths[:, None]
    weights, biases = qkv_weight.chunk(3), qkv_bias.chunk(3)
    heads = [
        F.linear(side, weights[i], biases[i]).unflatten(-1, (num_head, -1)).transpose(1, 2)
        for i, side in enumerate((query, key))
    ]
    if mask is not None:
        # To these kernels everything but zero means "leave out".
        mask = mask == 0
        if mask_type == 1:
            key_mask, mask = mask, None
    call = Call("softmax", heads[0], heads[1], heads[1], key_mask=key_mask)
    sight(Sighting(call, pair_mask=mask))


@functools.cache
def _watch_get_interface(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def watched(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Any:
        function = original(self, attn_implementation, default)
        return _watch_interface(function, function is default) if listening() else function

    return watched


def _watch_interface(function: Callable[..., Any], is_eager: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        before = sighted()
        with inside(module):
            out = function(module, query, key, value, attention_mask, *args, **kwargs)
            if listening() and sighted() == before:
                arguments = inspect.signature(function).bind_partial(
                    module, query, key, value, attention_mask, *args, **kwargs
                )
                named = {**arguments.kwargs, **arguments.arguments}
                sight(_interface_sighting(module, query, key, attention_mask, named, is_eager, out))
        return out

    return watched


def _interface_sighting(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    named: dict[str, Any],
    is_eager: bool,
    out: Any,
) -> Sighting:
    """What a function of Hugging Face's interface computed, from its arguments."""
    named = {**named.get("kwargs", {}), **named}
    key_mask, is_causal = None, False
    if mask is not None and mask.dim() == 2:
        key_mask, mask = mask.bool(), None
    if not is_eager and mask is None:
        # Eager functions know causality from the mask alone; the others are told.
        is_causal = named.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    problem = ""
    for name in (*_SCORE_CHANGES, *(() if is_eager else ("sliding_window",))):
        if named.get(name) is not None:
            problem = f"its scores are changed by {name!r}, which queries and keys do not tell"
    weights = None
    if is_eager and not float(named.get("dropout") or 0.0):
        weights = out[1] if isinstance(out, tuple) and isinstance(out[1], Tensor) else None
    options: dict[str, Any] = {"scale": named.get("scaling"), "is_causal": bool(is_causal)}
    call = Call("softmax", query, key, key, key_mask=key_mask, **options)
    return Sighting(call, pair_mask=mask, weights=weights, problem=problem)
