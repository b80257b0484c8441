"""A depthwise convolution of the values, beside any attention.

Linear attention is weak where softmax is strongest, between neighbours; a short filter over the
tokens gives it that for next to nothing.

Dimension legend: B batch, T tokens, C channels (all heads together), w tokens under the filter.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lln.checks import check_count
from lln.errors import InvalidInputError


class ValueConvolution(nn.Module):
    """out_t = Σ_s weight_s ∘ value_{t+s}: one filter per channel, no bias, zero at the start.

    Args:
        channels: C.
        tokens: w, an odd number.
        device: Where the filter lives.
        dtype: Its type.

    Example:
        >>> filter = ValueConvolution(8, 3)
        >>> filter(torch.randn(2, 10, 8)).abs().sum().item()
        0.0
    """

    def __init__(
        self,
        channels: int,
        tokens: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the filter."""
        super().__init__()
        check_count("convolution", tokens, least=1)
        if tokens % 2 == 0:
            raise InvalidInputError(
                f"convolution must be an odd number of tokens, or 0 for none, got {tokens}."
            )
        self.weight = nn.Parameter(torch.zeros(tokens, channels, device=device, dtype=dtype))

    def forward(
        self, value: Tensor, key_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Filter the tokens.

        Args:
            value: ``[B, T, C]``.
            key_mask: bool ``[B, T]``; masked tokens count as zero.
            is_causal: Whether the filter ends at a token instead of having it in the middle.
        """
        if key_mask is not None:
            value = torch.where(key_mask.unsqueeze(-1), value, 0.0)
        size, tokens = self.weight.shape[0], value.shape[1]
        before = size - 1 if is_causal else size // 2
        padded = F.pad(value, (0, 0, before, size - 1 - before))
        # Sums of shifts, because depthwise convolutions have slow gradients on a GPU.
        shifts = (padded[:, place : place + tokens] for place in range(size))
        weight = self.weight.to(value.dtype)
        return torch.stack([part * row for part, row in zip(shifts, weight, strict=True)]).sum(0)

    def extra_repr(self) -> str:
        """The settings, for ``print(module)``."""
        return f"tokens={self.weight.shape[0]}, channels={self.weight.shape[1]}"
