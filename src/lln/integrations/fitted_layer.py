"""One attention module fitted on what it was called with, and what to report of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from lln.integrations.attached import AttachedHeads
from lln.integrations.attend import attend
from lln.integrations.attention_call import AttentionCall
from lln.integrations.conversion_report import (
    LayerReport,
    PagesSeen,
    relative_change,
    span,
)
from lln.integrations.packed_batches import padded
from lln.matching.calibration import check_tokens, count_tokens, find_temperatures, unusual
from lln.matching.page_index import PageIndex
from lln.matching.rest_search import (
    FACTORS,
    NO_REST,
    KeyChoice,
    entropy_temperatures,
    find_rest,
)


def fit_layer(
    name: str, heads: AttachedHeads, call: AttentionCall, softmax_out: Tensor, calibrated: bool
) -> LayerReport:
    """Find α, β and offset, or projections, if asked to; compare the output with softmax's.

    ``heads`` will be attached to the module of that name; softmax's output is ``[B, H, T, E]``.
    """
    call = replace(call, heads=heads, settings=heads.settings, dropout_p=0.0)
    if calibrated:
        _fit(heads, call)
    sides = (attend(call).transpose(1, 2), softmax_out.transpose(1, 2))
    moved = relative_change(*sides, call.key_mask)
    _, count, _, width = call.query.shape
    if heads.has_pages:
        found = _describe_pages(heads, call)
        return LayerReport(name, heads.attention, count, width, moved=moved, **found)
    found = _describe_temperatures(heads, call, calibrated)
    if heads.attention == "lln_keys":
        found |= {"keys": call.keys, "block_size": call.block_size}
        if calibrated and isinstance(heads.settings.offset, str):
            found["longest"] = _longest(call)
    return LayerReport(name, heads.attention, count, width, moved=moved, **found)


def _describe_pages(heads: AttachedHeads, call: AttentionCall) -> dict[str, Any]:
    """What a report says of a module with pages."""
    if heads.index is None:
        return {"pages": PagesSeen(**call.page_sizes, rank=call.key.shape[-1])}
    tokens = int(count_tokens(call.key, call.key_mask).sum())
    return {"pages": PagesSeen(**call.page_sizes, rank=heads.index.rank), "tokens": tokens}


def _fit(heads: AttachedHeads, call: AttentionCall) -> None:
    if heads.has_pages:
        if heads.index is not None:
            query, key, _, mask = _samples(call)
            sinks = call.page_sizes["sinks"]
            found = PageIndex.of(query, key, heads.index.rank, sinks=sinks, key_mask=mask)
            heads.set_index(found)
        return
    _fit_temperatures(heads, call)
    if heads.attention == "lln_keys" and isinstance(heads.settings.offset, str):
        _fit_rest(heads, call)


def _fit_temperatures(heads: AttachedHeads, call: AttentionCall) -> None:
    """Set ``"fixed"`` and ``"learned"`` values, or start a running average, from one call."""
    statistics, mask = heads.settings.statistics, call.key_mask
    if statistics in ("fixed", "learned"):
        query, key, _, mask = _samples(call)
        if heads.matching == "rest":
            found = entropy_temperatures(query, key, mask, pooled=True)
        else:
            found = find_temperatures(query, key, mask, pooled=True)
        heads.set_temperatures(*found)
    elif statistics == "running":
        check_tokens(call.key, mask)
        # The first batch of training is where the running average starts.
        training = heads.training
        heads.train()
        heads.temperatures(call.query, call.key, call.value, mask, call.is_causal)
        heads.train(training)


def _fit_rest(heads: AttachedHeads, call: AttentionCall) -> None:
    """Set the offset, and how cool α and β are, by the error of the output."""
    query, key, value, mask = _samples(call)
    alpha, beta, _ = heads.numbers(query, key, value, mask, call.is_causal)
    assert alpha is not None
    assert beta is not None
    settings = heads.settings
    is_free = heads.matching == "rest" and settings.statistics in ("fixed", "learned")
    choice = KeyChoice(call.keys, call.block_size, call.group_size)
    may_be_none, factors = settings.offset == "fixed", FACTORS if is_free else (1.0,)
    options: dict[str, Any] = {"factors": factors, "may_be_none": may_be_none}
    alpha, beta, offset = find_rest(query, key, value, alpha, beta, mask, True, choice, **options)
    if is_free:
        heads.set_temperatures(alpha, beta)
    heads.set_offset(offset)


def _samples(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key, value and mask of a call; for exact keys every packed sequence is a sample."""
    sides = (call.query, call.key, call.value)
    if call.attention == "lln_keys" and call.cu_seqlens is not None:
        sides, mask = padded(sides, call.cu_seqlens)
        return *sides, mask
    return *sides, call.key_mask


def _longest(call: AttentionCall) -> int:
    """Tokens of the longest sequence of a call."""
    if call.cu_seqlens is not None:
        return int(call.cu_seqlens.diff().max())
    return int(count_tokens(call.key, call.key_mask).max())


def _describe_temperatures(
    heads: AttachedHeads, call: AttentionCall, calibrated: bool
) -> dict[str, Any]:
    """What a report says of α, β and the offset."""
    if heads.settings.statistics == "sample":
        return {}
    sides = (call.query, call.key, call.value, None, call.is_causal)
    found: dict[str, Any] = {}
    if heads.attention == "lln_keys":
        alpha, beta, offset = heads.numbers(*sides)
        if offset is not None:
            there = offset > NO_REST / 2
            found["no_rest"] = int((~there).sum())
            found["offset"] = span(offset[there] if there.any() else offset)
        assert isinstance(alpha, Tensor)
        assert isinstance(beta, Tensor)
    else:
        alpha, beta = heads.temperatures(*sides)
    found |= {"alpha": span(alpha), "beta": span(beta)}
    if calibrated:
        found["tokens"] = int(count_tokens(call.key, call.key_mask).sum())
        # One value per head, however the statistics shape it.
        sharp = unusual(call.query, call.key, call.key_mask, alpha.reshape(1, -1, 1, 1))
        found["sharp"] = int(sharp.sum())
    return found
