"""Softmax attention for the layers of a converted model that keep it, within a window or not.

Such layers get the same 2-D masks as their LLN neighbours. Layers with a sliding window run
`lln.window_attention`, exact and linear in the length, but for tokens that continue a cache.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import and_

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.errors import UnsupportedModelError
from lln.functional.windows import window_attention, window_attention_varlen
from lln.integrations.attention_call import AttentionCall
from lln.integrations.packed_batches import inside_sequences, is_packed, numbered


def softmax(call: AttentionCall) -> Tensor:
    """The softmax attention, Eq. (1), that a call would have been: ``[B, H, T, E]``."""
    if call.window is not None:
        _check_edge(call.window, call)
        if call.query.shape[2] == call.key.shape[2]:
            return _in_window(call, call.window - 1)
        call = _last_keys(call, call.window - 1)
    query, key, mask = call.query, call.key, call.mask
    if call.cu_seqlens is not None and not is_packed(mask):
        mask = numbered(call.cu_seqlens, query)
    tokens, keys = query.shape[2], key.shape[2]
    keep: list[Tensor] = []
    if call.is_causal or call.window is not None:
        # Queries are the last of the keys' positions.
        place = torch.arange(keys, device=query.device)
        distance = place[keys - tokens :, None] - place
        if call.is_causal:
            keep.append(distance >= 0)
        if call.window is not None:
            keep.append(distance.abs() < call.window)
    if mask is not None and is_packed(mask):
        keep.append((mask[:, None, :, None] == mask[:, None, None, :])[:, :, keys - tokens :])
    elif mask is not None:
        keep.append(mask[:, None, None, :])
    seen = reduce(and_, keep) if keep else None
    shares = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, call.value, seen, call.dropout_p, enable_gqa=shares
    )


def _in_window(call: AttentionCall, window: int) -> Tensor:
    """The same within a window, of tokens that are all there: nothing is N × N."""
    sides = (call.query, call.key, call.value)
    options = {"window": window, "dropout_p": call.dropout_p, **call.how()}
    if call.cu_seqlens is None:
        return window_attention(*sides, key_mask=call.mask, **options)
    return inside_sequences(window_attention_varlen, call.cu_seqlens)(*sides, **options)


def _last_keys(call: AttentionCall, window: int) -> AttentionCall:
    """The call with the keys that its queries, the last tokens, can see."""
    first = max(call.key.shape[2] - call.query.shape[2] - window, 0)
    mask = call.mask
    return replace(
        call,
        key=call.key[:, :, first:],
        value=call.value[:, :, first:],
        mask=None if mask is None else mask[:, first:],
    )


def _check_edge(window: int, call: AttentionCall) -> None:
    """Refuse a window that looks both ways and has an edge that transformers counts in two ways.

    Its masks show ``config.sliding_window`` tokens on either side, its flash attention one fewer
    than the layer says. Layers made to look both ways say one more than the configuration.
    """
    config = getattr(call.module, "config", None)
    if call.is_causal or window != getattr(config, "sliding_window", None):
        return
    if call.key.shape[2] > window:
        raise UnsupportedModelError(
            f"{type(call.module).__name__} looks both ways through a window of {window} tokens "
            "made for causal attention, and transformers' own attentions differ at its edge; give "
            f"at most {window} tokens, or set config.sliding_window = None."
        )
