"""α and β of one attention module, found on what it was called with, and what to say of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lln.integrations.conversion_report import span
from lln.matching.calibration import check_tokens, count_tokens, find_temperatures, unusual

if TYPE_CHECKING:
    from lln.integrations.attached import Heads
    from lln.integrations.attend import Call


def fit_temperatures(heads: Heads, call: Call, mask: Tensor | None) -> None:
    """Set ``"fixed"`` and ``"learned"`` values, or start a running average, from one call.

    Args:
        heads: Of the module.
        call: Its queries, keys and values.
        mask: bool ``[B, S]``, the tokens that count.
    """
    statistics = heads.settings.statistics
    if statistics in ("fixed", "learned"):
        heads.set_temperatures(*find_temperatures(call.query, call.key, mask, pooled=True))
    elif statistics == "running":
        check_tokens(call.key, mask)
        # The first batch of training is where the running average starts.
        training = heads.training
        heads.train()
        heads.temperatures(call.query, call.key, call.value, mask, call.is_causal)
        heads.train(training)


def describe_temperatures(
    heads: Heads, call: Call, mask: Tensor | None, calibrated: bool
) -> dict[str, Any]:
    """What a `lln.integrations.conversion_report.LayerReport` says of α and β.

    Args:
        heads: Of the module, fitted.
        call: What they were fitted on.
        mask: As in `fit_temperatures`.
        calibrated: Whether they were fitted.
    """
    if heads.settings.statistics == "sample":
        return {}
    alpha, beta = heads.temperatures(call.query, call.key, call.value, None, call.is_causal)
    found: dict[str, Any] = {"alpha": span(alpha), "beta": span(beta)}
    if calibrated:
        found["tokens"] = int(count_tokens(call.key, mask).sum())
        # One value a head, however the statistics shape it.
        sharp = unusual(call.query, call.key, mask, alpha.reshape(1, -1, 1, 1))
        found["sharp"] = int(sharp.sum())
    return found
