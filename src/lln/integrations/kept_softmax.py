"""Softmax attention for the layers of a converted model that keep it.

Such layers get the same 2-D masks as their LLN neighbours, so the N×N mask is made here.
"""

from __future__ import annotations

from functools import reduce
from operator import and_

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.errors import UnsupportedModelError
from lln.integrations.attention_call import AttentionCall
from lln.integrations.mask_kinds import is_packed
from lln.integrations.packed_batches import numbered


def softmax(call: AttentionCall) -> Tensor:
    """The softmax attention, Eq. (1), that a call would have been: ``[B, H, T, E]``."""
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
            _check_edge(call.window, call)
            keep.append(distance.abs() < call.window)
    if mask is not None and is_packed(mask):
        keep.append((mask[:, None, :, None] == mask[:, None, None, :])[:, :, keys - tokens :])
    elif mask is not None:
        keep.append(mask[:, None, None, :])
    return F.scaled_dot_product_attention(
        query,
        key,
        call.value,
        attn_mask=reduce(and_, keep) if keep else None,
        dropout_p=call.dropout_p,
        enable_gqa=query.shape[1] != key.shape[1],
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
