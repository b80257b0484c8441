"""One attention module fitted on what it was called with, and what to report of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from lln.integrations.attached import AttachedHeads
from lln.integrations.attend import attend
from lln.integrations.attention_call import AttentionCall
from lln.integrations.conversion_report import LayerReport, relative_change, span
from lln.matching.calibration import check_tokens, count_tokens, find_temperatures, unusual


def fit_layer(
    name: str, heads: AttachedHeads, call: AttentionCall, softmax_out: Tensor, calibrated: bool
) -> LayerReport:
    """Find α and β of a module if asked to, and compare its output with softmax's.

    Args:
        name: Of the module.
        heads: What will be attached to it.
        call: Its queries, keys and values.
        softmax_out: ``[B, H, T, E]``, what softmax makes of them.
        calibrated: Whether α and β are found on the call.
    """
    if calibrated:
        _fit_temperatures(heads, call)
    own = attend(replace(call, heads=heads, settings=heads.settings, dropout_p=0.0))
    moved = relative_change(own.transpose(1, 2), softmax_out.transpose(1, 2), call.key_mask)
    found = _describe_temperatures(heads, call, calibrated)
    _, count, _, width = call.query.shape
    return LayerReport(name, heads.attention, count, width, moved=moved, **found)


def _fit_temperatures(heads: AttachedHeads, call: AttentionCall) -> None:
    """Set ``"fixed"`` and ``"learned"`` values, or start a running average, from one call."""
    statistics, mask = heads.settings.statistics, call.key_mask
    if statistics in ("fixed", "learned"):
        heads.set_temperatures(*find_temperatures(call.query, call.key, mask, pooled=True))
    elif statistics == "running":
        check_tokens(call.key, mask)
        # The first batch of training is where the running average starts.
        training = heads.training
        heads.train()
        heads.temperatures(call.query, call.key, call.value, mask, call.is_causal)
        heads.train(training)


def _describe_temperatures(
    heads: AttachedHeads, call: AttentionCall, calibrated: bool
) -> dict[str, Any]:
    """What a report says of α and β."""
    if heads.settings.statistics == "sample":
        return {}
    alpha, beta = heads.temperatures(call.query, call.key, call.value, None, call.is_causal)
    found: dict[str, Any] = {"alpha": span(alpha), "beta": span(beta)}
    if calibrated:
        found["tokens"] = int(count_tokens(call.key, call.key_mask).sum())
        # One value per head, however the statistics shape it.
        sharp = unusual(call.query, call.key, call.key_mask, alpha.reshape(1, -1, 1, 1))
        found["sharp"] = int(sharp.sum())
    return found
