"""α and β measured on the batch at hand, again and again during a training.

Matching by a formula follows the weights at every step, but assumes Gaussian entries.
`lln.calibrate` assumes nothing and takes long, so a training measures every few steps and keeps
what it found.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lln import calibrate
from lln.errors import InvalidInputError
from lln.nn.heads import LLNCore
from lln.nn.key_heads import LLNKeysCore

# Steps between two measurements. Weights change little meanwhile, and one takes as long as a step.
EVERY = 50
# Query rows of every text to measure on; a batch has many texts.
ROWS = 32


class CalibratedTemperatures(nn.Module):
    """α, β per head, measured in training on the first and every n-th batch; fixed in between."""

    alpha: Tensor
    beta: Tensor
    calls: Tensor

    def __init__(self, num_heads: int, every: int = EVERY) -> None:
        """Start at 1, which the first batch replaces; ``every`` is n."""
        super().__init__()
        self.every = every
        self.register_buffer("alpha", torch.ones(num_heads))
        self.register_buffer("beta", torch.ones(num_heads))
        # Saved with the model, so that a training that is resumed measures at the same steps.
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    @torch.compiler.disable
    def forward(
        self, query: Tensor, key: Tensor, key_mask: Tensor | None = None, is_causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        """α, β of shape ``[1, H, 1, 1]``."""
        if is_causal:
            raise InvalidInputError(
                "+calibrated would show rows of a causal sequence the future; leave it out."
            )
        if self.training:
            if self.calls.item() % self.every == 0:
                found = calibrate(
                    query.detach(), key.detach(), key_mask=key_mask, scope="batch", rows=ROWS
                )
                for kept, new in zip((self.alpha, self.beta), found, strict=True):
                    kept.copy_(new.flatten())
            self.calls += 1
        return self.alpha[None, :, None, None], self.beta[None, :, None, None]


def calibrate_while_training(model: nn.Module) -> None:
    """Let LLN, with blocks or without, measure α and β in every layer instead of matching them."""
    for module in list(model.modules()):
        if isinstance(module, LLNCore) and not isinstance(module, LLNKeysCore):
            module.statistics = CalibratedTemperatures(module.num_heads)
