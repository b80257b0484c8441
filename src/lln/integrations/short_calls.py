"""Softmax itself in calls of a converted layer that are sooner with it.

The conversion allows it (``config.lln["or_softmax"]``), because softmax is what the model was
trained with. A layer that learns, learns to live with exact keys: its first step ends that, and
what is saved afterwards says so.

Dimension legend: B batch, H query heads, Hk key heads, T tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn

from lln.checks.call import Call
from lln.functional.checked_call import checked_call
from lln.functional.softmax_way import Softmax, softmax_attention
from lln.functional.ways import choose
from lln.integrations.attention_call import AttentionCall
from lln.observers import is_observed
from lln.tracing import is_untraced

# Whether softmax answers calls of a layout: what `lln.functional.ways` said, kept in a form that
# is found again in a few microseconds. A layer on a GPU has no more to lose.
_decided: dict[Hashable, bool] = {}
_MOST_DECIDED = 4096


def end_softmax(module: nn.Module) -> None:
    """Let a module, or all modules of a model, run exact keys alone from now on."""
    for one in module.modules():
        settings = getattr(getattr(one, "config", None), "lln", None)
        if isinstance(settings, dict) and settings.get("or_softmax"):
            settings["or_softmax"] = False


def short_softmax(call: AttentionCall) -> Tensor | None:
    """Softmax attention ``[B, H, T, D]``; None where the layer has to run exact keys."""
    query, key, value, mask = call.query, call.key, call.value, call.mask
    heads, settings = call.heads, call.settings
    if heads is None or not settings.or_softmax or heads.training or is_observed():
        return None
    learns = query.requires_grad or key.requires_grad or value.requires_grad
    if (learns and torch.is_grad_enabled()) or not is_untraced(query):
        return None
    if call.cu_seqlens is not None or call.dropout_p or heads.convolution is not None:
        return None
    layout = (
        *(query.shape, key.shape, value.shape, query.dtype, query.device, call.is_causal),
        None if mask is None else (mask.shape, mask.dtype),
        *(call.attention, settings.impl, settings.block_size, settings.select),
        *(settings.group_size, settings.keys, heads.keys),
    )
    pays = _decided.get(layout)
    if pays is None:
        if len(_decided) >= _MOST_DECIDED:
            _decided.clear()
        pays = _decided[layout] = _pays(call)
    return softmax_attention(query, key, value, mask, call.is_causal) if pays else None


def _pays(call: AttentionCall) -> bool:
    """What the list of ways says, of a call that was checked as any other."""
    if call.attention != "lln_keys" or call.query.shape[2] != call.key.shape[2]:
        return False
    options = call.key_options() | {"key_mask": call.mask, "is_causal": call.is_causal}
    own = Call("lln_keys", call.query, call.key, call.value, **options, or_softmax=True)
    checked = checked_call(own, "lln_keys_attention", True)
    return call.settings.impl == "auto" and isinstance(choose(checked, "auto"), Softmax)
