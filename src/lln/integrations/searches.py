"""What a conversion asks of a search by measured trials, which the laboratory brings.

The laboratory names its search in the entry points of its distribution, as it does its commands.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any, Protocol

from torch import Tensor, nn

from lln.errors import BackendUnavailableError, InvalidInputError
from lln.integrations.attached import AttachedHeads, KeptSoftmax
from lln.integrations.attention_call import AttentionCall
from lln.integrations.conversion_report import Found, LayerReport

SEARCHES = "lln.searches"
# What a search found, beside a converted model.
REPORT_FILE = "lln_target.json"

# Called with the part of the work, the step and how many steps there are at most.
OnStep = Callable[[str, int, int], object]

# A model as a function from a batch to its outputs, whatever library it comes from.
Run = Callable[[dict[str, Tensor]], Any]

# Gives an attention module what it is to run.
Attach = Callable[[nn.Module, AttachedHeads | KeptSoftmax], object]


class Search(Protocol):
    """Chooses how many exact keys every layer gets."""

    def add(
        self,
        call: AttentionCall,
        stays: LayerReport,
        make: Callable[[int], AttachedHeads] | None,
        softmax_out: Tensor,
    ) -> object:
        """Take the next layer, with what makes its heads for so many keys; None = stays softmax."""

    def run(
        self,
        run: Run,
        attach: Attach,
        inputs: dict[str, Tensor],
        expected: Any,
        holdout: dict[str, Tensor] | None,
        on_step: OnStep,
    ) -> tuple[Found, list[LayerReport]]:
        """Choose, attach what was chosen to all layers, and say what was found."""
        ...


def load_search() -> Callable[..., Search]:
    """What makes a search, or one sentence on what to install."""
    for entry in metadata.entry_points(group=SEARCHES, name="target"):
        return entry.load()
    raise BackendUnavailableError(
        "a conversion to a target is a search, which comes with the laboratory; run "
        'pip install "lln[lab]".'
    )


def search_for(target: float | None, holdout: object | None, *given: Any) -> Search | None:
    """The search that a conversion asks for, if it does.

    It checks the rest of what the conversion was given: model, attention, statistics, keys,
    calibrate.
    """
    if target is not None:
        return load_search()(target, *given)
    if holdout is not None:
        raise InvalidInputError(
            "holdout goes with target, whose choice it verifies; pass target=0.99, or leave "
            "holdout out."
        )
    return None
