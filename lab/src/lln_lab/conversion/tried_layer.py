"""A layer with its fits for every number of exact keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

from lln.integrations.attached import AttachedHeads, KeptSoftmax
from lln.integrations.attention_call import AttentionCall
from lln.integrations.conversion_report import LayerReport
from lln.integrations.fitted_layer import fit_layer
from lln.integrations.searches import Attach
from lln_lab.conversion.attention_cost import AttentionShape

# Numbers of exact keys that a layer may get.
LADDER = (0, 16, 32, 64, 128, 256)


def ladder_of(call: AttentionCall) -> tuple[int, ...]:
    """The numbers of keys to try, and none beyond the first that is all outside a block."""
    tokens = call.key.shape[2]
    tried = [keys for keys in LADDER if keys == 0 or keys < tokens]
    enough = [keys for keys in tried if keys >= tokens - call.block_size]
    return tuple(keys for keys in tried if not enough or keys <= enough[0])


@dataclass
class TriedLayer:
    """An attention module with its fits for every number of keys; none = it stays softmax.

    Attributes:
        name: In the base model.
        module: The model's attention module.
        shape: Of its attention.
        tokens: Length of the batch.
        fits: By keys: what to attach, and its report.
        softmax: The report if it stays softmax.
    """

    name: str
    module: nn.Module
    shape: AttentionShape
    tokens: int
    softmax: LayerReport
    fits: dict[int, tuple[AttachedHeads, LayerReport]] = field(default_factory=dict)

    @classmethod
    def of(cls, call: AttentionCall, softmax: LayerReport) -> TriedLayer:
        """The layer that made a call, not fitted yet."""
        shape, tokens = AttentionShape.of(call), call.key.shape[2]
        return cls(softmax.name, call.module, shape, tokens, softmax)

    def fit(
        self,
        make: Callable[[int], AttachedHeads],
        call: AttentionCall,
        softmax_out: Tensor,
    ) -> None:
        """Find α, β and the offset for every number of keys, and how far the output moves."""
        for keys in ladder_of(call):
            heads = make(keys)
            self.fits[keys] = (heads, fit_layer(self.name, heads, call, softmax_out, True))

    def take(self, keys: int | None, attach: Attach) -> LayerReport:
        """Attach the fit for so many keys, or softmax; returns its report."""
        attached, report = (KeptSoftmax(), self.softmax) if keys is None else self.fits[keys]
        attach(self.module, attached)
        if isinstance(attached, AttachedHeads):
            attached.train(self.module.training)
        return report
