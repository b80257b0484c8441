"""The attention functions that Hugging Face calls.

Every call goes one of five ways: dense (padded batches, cross attention), packed sequences,
causal with a past (a cache), softmax where kept or sooner, or over the tokens of several ranks.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width,
E value width.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from lln.eager.dropout import drop_keys
from lln.eager.run import join
from lln.eager.summary import KeySummary
from lln.errors import BackendUnavailableError, InvalidInputError, UnsupportedModelError
from lln.functional.dense import block_diagonal_attention, lln_attention, lln_diag_attention
from lln.functional.exact_keys import lln_keys_attention, lln_keys_attention_varlen
from lln.functional.packed import lln_attention_varlen, lln_diag_attention_varlen
from lln.functional.pages import page_attention, page_attention_varlen
from lln.integrations import streaming
from lln.integrations.attached import AttachedHeads, KeptSoftmax, attached_to
from lln.integrations.attention_call import AttentionCall
from lln.integrations.kept_softmax import softmax
from lln.integrations.packed_batches import boundaries, inside_sequences
from lln.integrations.settings import Settings
from lln.integrations.sharded_call import attend_sharded, ranks_of
from lln.integrations.short_calls import end_softmax, repeated_softmax, short_softmax

# What a model may ask of its attention that changes single scores.
_REFUSED = {
    "position_bias": "a bias for every pair of positions",
    "softcap": "a soft cap of the scores",
    "s_aux": "attention sinks",
    "head_mask": "a mask of heads",
    "cache": "a paged cache",
}

_LINEAR_DECODING = (
    "LLN attention decodes from a full key-value cache here, which costs O(N) per token; pass "
    "past_key_values=lln.integrations.cache.LLNCache(model) for O(1)."
)


# Set while `convert` looks at a model: sees every call and may answer it.
_observer: Callable[[AttentionCall], Tensor | None] | None = None


@contextmanager
def observed(observer: Callable[[AttentionCall], Tensor | None]) -> Any:
    """Show every call to ``observer``; what it returns, unless None, is the attention's output."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


def forward(
    attention: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """LLN attention, Eq. (8), alone, with diagonal blocks or with exact keys, for Hugging Face.

    Args:
        attention: ``"lln"``, ``"lln_diag"`` or ``"lln_keys"``.
        module: The model's attention module.
        query: ``[B, H, T, D]``, any strides.
        key: ``[B, Hk, S, D]``.
        value: ``[B, Hk, S, E]``.
        attention_mask: As `lln.integrations.masks.slicing_mask` returns it.
        dropout: Probability to drop a key; the model gives 0 in eval mode.
        scaling: Factor of the softmax scores; α and β are matched to scores with this factor.
        is_causal: None = what the module says.
        **kwargs: ``cu_seq_lens_q``, ``sliding_window``, ``output_attentions`` and more.

    Returns:
        ``[B, T, H, E]`` contiguous, and None or, with ``output_attentions``, the weights.
    """
    for name in _REFUSED.keys() & kwargs:
        if kwargs[name] is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} passes {name} ({_REFUSED[name]}), which linear attention "
                "cannot apply; this model must keep its own attention."
            )
    if scaling is not None and abs(scaling * math.sqrt(query.shape[-1]) - 1) > 1e-6:
        query = query * (scaling * math.sqrt(query.shape[-1]))
    settings = Settings.of(getattr(module, "config", None))
    attached = attached_to(module)
    if settings.attached and attached is None and _observer is None:
        raise InvalidInputError(
            f"config.lln says that {type(module).__name__} was converted, but its statistics are "
            "not there: call lln.integrations.transformers.register() before loading the model."
        )
    if isinstance(attached, AttachedHeads) and _observer is None:
        if attached.attention != attention:
            raise InvalidInputError(
                f"this model was converted to {attached.attention!r} and cannot run as "
                f"{attention!r}; convert it again."
            )
        attached.check_settings(settings)
        if settings.or_softmax and attached.training and torch.is_grad_enabled():
            end_softmax(module)
        if attached.softmax_pays and ranks_of(module) is None:
            sides, causal = (query, key, value), is_causal
            causal = getattr(module, "is_causal", True) if causal is None else causal
            again = repeated_softmax(attached, *sides, attention_mask, causal, dropout, kwargs)
            if again is not None:
                return again.transpose(1, 2).contiguous(), None
    marked = getattr(key, "lln_past", None)
    past = None if marked is None else marked.take()
    mask = _checked_mask(attention_mask)
    call = AttentionCall(
        module=module,
        attention=attention,
        settings=settings,
        heads=attached if isinstance(attached, AttachedHeads) else None,
        query=query,
        key=key,
        value=value,
        mask=mask,
        cu_seqlens=boundaries(kwargs, mask, query),
        is_causal=getattr(module, "is_causal", True) if is_causal is None else bool(is_causal),
        window=kwargs.get("sliding_window"),
        dropout_p=dropout,
        indexed=getattr(key, "lln_index", None),
    )
    if ranks_of(module) is not None:
        if _observer is not None:
            raise InvalidInputError(
                "convert looks at a model on one process; call "
                "lln.integrations.context_parallel.disconnect(model) first."
            )
        asked = bool(kwargs.get("output_attentions"))
        out = attend_sharded(call, past=past is not None, weights=asked)
        return out.transpose(1, 2).contiguous(), None
    if _observer is not None:
        out = _observer(call)
        if out is not None:
            return out.transpose(1, 2).contiguous(), None
    keeps = isinstance(attached, KeptSoftmax) or call.window is not None
    weights = None
    if not kwargs.get("output_attentions"):
        short = None if keeps or past is not None else short_softmax(call)
        out = short if short is not None else softmax(call) if keeps else attend(call, past)
    elif past is None:
        out, weights = _with_weights(call, softmax if keeps else _attend)
    else:
        raise InvalidInputError(
            "output_attentions=True cannot be met with LLNCache, which keeps no keys to give "
            "weights of; pass use_cache=False."
        )
    return out.transpose(1, 2).contiguous(), weights


def _checked_mask(mask: object) -> Tensor | None:
    """Refuse masks that are not ours."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        seen = f"{mask.dim()}-D" if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidInputError(
            f"attention_mask is {seen}: LLN attention never forms the N×N scores that such a mask "
            "belongs to; pass a 2-D [B, S] padding mask."
        )
    return mask


def attend(call: AttentionCall, past: streaming.Past | None = None) -> Tensor:
    """What a module answers, the convolution of its values included: ``[B, H, T, E]``."""
    return _with_neighbours(call, _attend(call, past))


def _with_neighbours(call: AttentionCall, out: Tensor) -> Tensor:
    """Add the convolution of the values, if the module has one."""
    if call.heads is None or call.heads.convolution is None:
        return out
    problem = None
    if call.is_causal:
        problem = "a causal call, whose cache would have to keep them"
    elif call.cu_seqlens is not None:
        problem = "packed sequences; pad them, one sequence per row"
    elif call.query.shape[2] != call.key.shape[2]:
        problem = "cross attention"
    if problem is not None:
        raise InvalidInputError(
            f"convolution adds the values of neighbouring tokens and does not take {problem}."
        )
    return out + call.heads.neighbours(call.value, call.key_mask).to(out.dtype)


def _attend(call: AttentionCall, past: streaming.Past | None = None) -> Tensor:
    """LLN attention, alone, with diagonal blocks or with exact keys: ``[B, H, T, E]``."""
    if call.has_pages:
        return _attend_pages(call)
    if call.attention == "lln_keys":
        return _attend_keys(call)
    continues = past is not None or call.query.shape[2] != call.key.shape[2]
    if call.is_causal and call.cu_seqlens is None and continues:
        return _continue(call, past)
    sides = (call.query, call.key, call.value)
    alpha, beta = call.temperatures()
    shared, criterion = call.how(), call.settings.criterion(call.attention)
    long = {"alpha": alpha, "beta": beta, "matching": criterion, **shared}
    lln, lln_diag, diagonal = lln_attention, lln_diag_attention, block_diagonal_attention
    if call.cu_seqlens is None:
        shared["key_mask"] = long["key_mask"] = call.mask
    else:
        lln = inside_sequences(lln_attention_varlen, call.cu_seqlens)
        lln_diag = inside_sequences(lln_diag_attention_varlen, call.cu_seqlens)
        diagonal = partial(lln_diag, mix=0.0, **long)
    if call.attention == "lln":
        return lln(*sides, dropout_p=call.dropout_p, **long)
    mix, block_size = call.mix(), call.block_size
    if call.heads is None or call.heads.join not in ("scale", "heads"):
        return lln_diag(*sides, mix=mix, block_size=block_size, dropout_p=call.dropout_p, **long)
    # Keys are dropped once for both parts.
    sides = (call.query, call.key, drop_keys(call.value, call.dropout_p))
    short = diagonal(*sides, block_size=block_size, **shared)
    return call.heads.combine(lln(*sides, **long), short, mix)


def _attend_keys(call: AttentionCall) -> Tensor:
    """Attention over near tokens, chosen keys and slots."""
    options = call.key_options() | call.how()
    # Values are dropped, as everywhere: a dropped key keeps its weight and adds nothing.
    sides = (call.query, call.key, drop_keys(call.value, call.dropout_p))
    if call.cu_seqlens is None:
        return lln_keys_attention(*sides, key_mask=call.mask, **options)
    return inside_sequences(lln_keys_attention_varlen, call.cu_seqlens)(*sides, **options)


def _attend_pages(call: AttentionCall) -> Tensor:
    """Attention over near tokens, the first tokens and chosen pages; a cache gives all keys."""
    options = {**call.page_options(), **call.how(), "dropout_p": call.dropout_p}
    sides = (call.query, call.key, call.value)
    if call.cu_seqlens is None:
        return page_attention(*sides, key_mask=call.mask, **options)
    return inside_sequences(page_attention_varlen, call.cu_seqlens)(*sides, **options)


def _continue(call: AttentionCall, past: streaming.Past | None) -> Tensor:
    """Causal attention of tokens that come after others, kept in a cache."""
    tokens, keys = call.query.shape[2], call.key.shape[2]
    if call.settings.impl not in ("auto", "eager"):
        raise BackendUnavailableError(
            f"impl {call.settings.impl!r} cannot continue a cache, which plain PyTorch updates; "
            "set config.lln['impl'] = 'auto' to generate."
        )
    if call.dropout_p > 0:
        raise InvalidInputError(
            "attention dropout cannot be applied to tokens that continue a cache; call "
            "model.eval(), or train without past_key_values."
        )
    if tokens > keys:
        raise InvalidInputError(
            f"causal attention got {tokens} queries and {keys} keys; queries are the last of the "
            "keys' positions."
        )
    new = replace(
        call,
        key=call.key[:, :, keys - tokens :],
        value=call.value[:, :, keys - tokens :],
        mask=None if call.mask is None else call.mask[:, -tokens:],
    )
    # Of a causal call they are never None.
    alpha, beta = cast("tuple[float | Tensor, float | Tensor]", new.temperatures())
    if past is None:
        if tokens == 1:
            warnings.warn(_LINEAR_DECODING, stacklevel=2)
        past = _past_of(call, keys - tokens, beta)
    sides = (new.query, new.key, new.value, past)
    long = streaming.long_range(*sides, alpha, beta, new.mask, call.settings.impl)
    if call.attention == "lln":
        return long
    short = streaming.short_range(*sides, call.block_size, new.mask)
    mix = new.mix()
    if call.heads is None:
        return join(long, short, mix).to(long.dtype)
    return call.heads.combine(long, short, mix)


def _past_of(call: AttentionCall, length: int, beta: float | Tensor) -> streaming.Past:
    """The past that the first ``length`` keys of a full cache amount to."""
    key, value = call.key[:, :, :length], call.value[:, :, :length]
    mask = None if call.mask is None else call.mask[:, :length]
    summary = KeySummary.of(key, value, beta, mask)
    past = streaming.Past(summary.log_mass, summary.centroid)
    if call.attention == "lln_diag":
        streaming.keep_block(key, value, past, call.block_size, mask)
    return past


def _with_weights(
    call: AttentionCall, attention: Callable[[AttentionCall], Tensor]
) -> tuple[Tensor, Tensor]:
    """Attention and its implied N×N weights, for inspection: unit vectors attended to beside v.

    In one pass, because running statistics count every call.
    """
    if call.cu_seqlens is not None:
        raise InvalidInputError("output_attentions=True cannot be met for packed sequences.")
    if call.heads is not None and call.heads.join in ("scale", "ratio"):
        raise InvalidInputError(
            f"output_attentions=True cannot be met with mix={call.heads.join!r}: every channel "
            "then has weights of its own."
        )
    unit = torch.eye(call.key.shape[2], dtype=call.value.dtype, device=call.value.device)
    value = torch.cat([call.value, unit.expand(*call.key.shape[:2], -1, -1)], dim=-1)
    both = attention(replace(call, value=value))
    out, weights = both.split([call.value.shape[3], unit.shape[0]], dim=-1)
    return _with_neighbours(call, out), weights
