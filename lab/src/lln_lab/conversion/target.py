"""Conversion to a target: the fewest exact keys with which a model is as good as asked."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

from torch import Tensor, nn

from lln.checks.names import shown
from lln.errors import InvalidInputError
from lln.integrations.attached import AttachedHeads
from lln.integrations.attention_call import AttentionCall
from lln.integrations.conversion_report import LayerReport
from lln.integrations.searches import Attach, OnStep, Run
from lln_lab.conversion.target_report import TargetReport
from lln_lab.conversion.target_trials import TargetTrials
from lln_lab.conversion.tried_layer import TriedLayer


class TargetSearch:
    """The search that a conversion with a target finds in the entry points.

    Args:
        target: Of `lln.integrations.convert.convert`, like the others.
        model: To convert.
        attention: What the model is converted to.
        statistics: Where α and β come from.
        keys: How many exact keys were asked for.
        calibrate: The batch to search on.
    """

    def __init__(
        self,
        target: float,
        model: nn.Module,
        attention: str,
        statistics: str,
        keys: int | None,
        calibrate: object | None,
    ) -> None:
        """Refuse a target that cannot be met or understood, in one sentence."""
        if isinstance(target, bool) or not isinstance(target, Real) or not 0 < target < 1:
            raise InvalidInputError(
                "target must be a number between 0 and 1, the mean cosine with the original's "
                f"output, as 0.99, got {shown(target)}."
            )
        if attention != "lln_keys":
            raise InvalidInputError(
                f"target goes with attention 'lln_keys', whose keys it chooses, got {attention!r}."
            )
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise InvalidInputError(
                f"target does not take encoder–decoder models as {type(model).__name__}, because "
                "cross attention has no exact keys; convert the encoder by itself."
            )
        if calibrate is None:
            raise InvalidInputError("target needs calibrate, inputs to measure every layer on.")
        if keys is not None:
            raise InvalidInputError(
                f"target chooses the keys of every layer itself; leave keys out, got {keys!r}."
            )
        if statistics == "sample":
            raise InvalidInputError(
                "target keeps what it found on the batch; choose statistics 'fixed', 'running' or "
                "'learned', got 'sample'."
            )
        self.target = target
        self.layers: list[TriedLayer] = []

    def add(
        self,
        call: AttentionCall,
        stays: LayerReport,
        make: Callable[[int], AttachedHeads] | None,
        softmax_out: Tensor,
    ) -> None:
        """Fit a layer with every number of keys; without ``make`` it stays softmax."""
        layer = TriedLayer.of(call, stays)
        if make is not None:
            layer.fit(make, call, softmax_out)
        self.layers.append(layer)

    def run(
        self,
        run: Run,
        attach: Attach,
        inputs: dict[str, Tensor],
        expected: Any,
        holdout: dict[str, Tensor] | None,
        on_step: OnStep,
    ) -> tuple[TargetReport, list[LayerReport]]:
        """Choose, attach what was chosen to all layers, and say what was found."""
        trials = TargetTrials(
            run, attach, self.layers, self.target, inputs, expected, holdout, on_step
        )
        return trials.run()
