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
from lln.integrations.attached import AttachedHeads
from lln.integrations.attention_call import AttentionCall
from lln.observers import is_observed
from lln.tracing import is_untraced

# What a call of Hugging Face may ask for that softmax alone does not answer.
_ASKS_MORE = frozenset({"sliding_window", "output_attentions", "cu_seq_lens_q", "cu_seq_lens_k"})


def end_softmax(module: nn.Module) -> None:
    """Let a module, or all modules of a model, run exact keys alone from now on."""
    for one in module.modules():
        settings = getattr(getattr(one, "config", None), "lln", None)
        if isinstance(settings, dict) and settings.get("or_softmax"):
            settings["or_softmax"] = False


def repeated_softmax(
    heads: AttachedHeads,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    options: dict[str, Any],
) -> Tensor | None:
    """Softmax attention of a call like one that `short_softmax` took; None for any other.

    On a GPU a short call has no more to lose than the few microseconds that this takes.
    """
    if heads.training or dropout_p or hasattr(key, "lln_past") or is_observed():
        return None
    for name in _ASKS_MORE & options.keys():
        if options[name] is not None and options[name] is not False:
            return None
    if not is_untraced(query) or (
        torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad or value.requires_grad)
    ):
        return None
    pays = heads.softmax_pays.get(_layout(query, key, value, mask, is_causal))
    return softmax_attention(query, key, value, mask, is_causal) if pays else None


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
    return softmax_attention(*sides, call.mask, call.is_causal) if pays else None


def _layout(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> Hashable:
    form = None if mask is None else (mask.shape, mask.dtype)
    shapes = query.shape, key.shape, value.shape
    return *shapes, query.dtype, query.device, bool(is_causal), form


def _pays(call: AttentionCall) -> bool:
    """What the list of ways says, of a call that was checked as any other."""
    has_more = call.heads is not None and call.heads.convolution is not None
    if call.attention != "lln_keys" or has_more or call.query.shape[2] != call.key.shape[2]:
        return False
    if call.has_pages:
        return call.settings.impl == "auto" and _sees_all(call)
    sides, options = (call.query, call.key, call.value), call.key_options()
    own = Call("lln_keys", *sides, key_mask=call.mask, **options, or_softmax=True)
    checked = checked_call(own, "lln_keys_attention", True)
    return call.settings.impl == "auto" and isinstance(choose(checked, "auto"), Softmax)


def _sees_all(call: AttentionCall) -> bool:
    """Whether every query sees all tokens that it may see, which is softmax, one way or another."""
    sizes, tokens = call.page_sizes, call.key.shape[2]
    chosen = sizes["pages"] * sizes["page_size"]
    # Looking both ways, pages are cut by the window on either side.
    return tokens <= (sizes["window"] + 1 + chosen if call.is_causal else chosen)
