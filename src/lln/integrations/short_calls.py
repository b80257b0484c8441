"""Softmax itself in calls of a converted layer that are sooner with it.

The conversion allows it (``config.lln["or_softmax"]``), because softmax is what the model was
trained with. A layer that learns, learns to live with exact keys: its first step ends that.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from lln.checks.call import Call
from lln.functional.checked_call import checked_call
from lln.functional.prepared_calls import MOST_LAYOUTS
from lln.functional.softmax_way import Softmax, softmax_attention
from lln.functional.ways import choose
from lln.integrations.attached import ATTRIBUTE, AttachedHeads
from lln.integrations.attention_call import AttentionCall
from lln.integrations.settings import held_by
from lln.integrations.sharded_call import RANKS
from lln.observers import is_observed
from lln.tracing import is_untraced

# What a model tells its attention that changes nothing here.
_ASKS_NOTHING = frozenset({"position_ids", "use_cache", "output_hidden_states", "return_dict"})


def end_softmax(module: nn.Module) -> None:
    """Let a module, or all modules of a model, run exact keys alone from now on."""
    for one in module.modules():
        settings = getattr(getattr(one, "config", None), "lln", None)
        if isinstance(settings, dict) and settings.get("or_softmax"):
            settings["or_softmax"] = False


def repeated_softmax(
    attention: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    scaling: float | None,
    is_causal: bool | None,
    options: dict[str, Any],
) -> Tensor | None:
    """Softmax attention of a call like one that `short_softmax` took; None for any other.

    On a GPU a short call has no more to lose than the few microseconds that this takes.
    """
    heads = module._modules.get(ATTRIBUTE)
    if not (isinstance(heads, AttachedHeads) and heads.softmax_pays) or not is_untraced(query):
        return None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not heads.softmax_pays.get(_layout(query, key, value, mask, causal)):
        return None
    if heads.training or dropout_p or hasattr(key, "lln_past") or heads.attention != attention:
        return None
    if RANKS in vars(module) or is_observed() or held_by(module.config) != heads.pays_under:
        return None
    if torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    ):
        return None
    if scaling is not None and scaling != heads.usual_scaling:
        return None
    for name, given in options.items():
        if given is not None and given is not False and name not in _ASKS_NOTHING:
            return None
    return softmax_attention(query, key, value, mask, causal)


def short_softmax(call: AttentionCall) -> Tensor | None:
    """Softmax attention, shape ``[B, H, T, D]``; None where the layer has to run exact keys."""
    sides, heads = (call.query, call.key, call.value), call.heads
    if heads is None or not call.settings.or_softmax or heads.training or call.dropout_p:
        return None
    if call.cu_seqlens is not None or is_observed() or not is_untraced(call.query):
        return None
    if torch.is_grad_enabled() and any(side.requires_grad for side in sides):
        return None
    layout, known = _layout(*sides, call.mask, call.is_causal), heads.softmax_pays
    pays = known.get(layout)
    if pays is None:
        if len(known) >= MOST_LAYOUTS:
            known.clear()
        pays = known[layout] = _pays(call)
        heads.pays_under = dict(held_by(call.module.config))
    return softmax_attention(*sides, call.mask, call.is_causal) if pays else None


def _layout(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> Hashable:
    form = None if mask is None else (mask.shape, mask.dtype)
    shapes = (query.shape, key.shape, value.shape)
    return shapes, query.dtype, is_causal, form


def _pays(call: AttentionCall) -> bool:
    """What the list of ways says, of a call that was checked as any other."""
    has_more = call.heads is not None and call.heads.convolution is not None
    if call.attention != "lln_keys" or has_more or call.query.shape[2] != call.key.shape[2]:
        return False
    if call.has_pages:
        kind, name, options = "pages", "page_attention", dict[str, Any](call.page_sizes)
        options |= {"keys": options.pop("pages"), "is_causal": call.is_causal}
    else:
        kind, name, options = "lln_keys", "lln_keys_attention", call.key_options()
    sides = (call.query, call.key, call.value)
    own = Call(kind, *sides, key_mask=call.mask, **options, or_softmax=True)
    way = choose(checked_call(own, name, True), "auto")
    return call.settings.impl == "auto" and isinstance(way, Softmax)
