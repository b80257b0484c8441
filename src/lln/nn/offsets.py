"""Where the offset of attention with exact keys comes from: matching, a buffer or a parameter.

The offset g puts the mass of the summary's slots on the scale of softmax scores
(`lln.matching.mass`). Each class maps α, β and the moments of a call to g.

Dimension legend: B batch, H heads, T tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lln import checks
from lln.checks.names import shown
from lln.errors import InvalidInputError
from lln.functional.statistics import measured_moments
from lln.matching.mass import keys_temperatures, mass_offset
from lln.matching.moments import Moments
from lln.nn.temperatures import RunningStatistics, SampleStatistics, per_head
from lln.precision import without_autocast
from lln.tracing import is_compiling, values_are_readable

Temperature = float | Tensor | None


class MatchedOffset(nn.Module):
    """The closed form of `lln.matching.mass` in every call; keeps no state."""


class FixedOffset(nn.Module):
    """One offset per head as a buffer: given once, saved with the model, never trained."""

    value: Tensor

    def __init__(
        self, num_heads: int, offset: float | Tensor, *, device: torch.device | str | None = None
    ) -> None:
        """Keep the offset: a number or H values."""
        super().__init__()
        kept = per_head("offset", offset, num_heads, device, is_positive=False)
        self.register_buffer("value", kept)

    def forward(self) -> Tensor:
        """``[1, H, 1, 1]``."""
        return self.value[None, :, None, None]


class LearnedOffset(nn.Module):
    """One offset per head as a parameter, which starts at what the first batch gives.

    The closed form of the first batch of training, averaged over its samples and over all
    processes, is where it starts. In eval mode before that, every call has its own closed form.
    """

    known: Tensor

    def __init__(
        self,
        num_heads: int,
        offset: float | Tensor | None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        """Start at a number, at H values, or (None) at what the first batch gives."""
        super().__init__()
        start = 0.0 if offset is None else offset
        self.value = nn.Parameter(per_head("offset", start, num_heads, device, is_positive=False))
        self.register_buffer("known", torch.full((), offset is not None, device=device))
        # What `known` says, once it was read: looking at a tensor on a GPU waits for it.
        self._has_begun = offset is not None

    def forward(self, closed_form: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
        """``[1, H, 1, 1]`` with gradients; before training has begun, ``[B, H, 1, 1]``.

        Args:
            closed_form: Gives the closed form ``[B, H, 1, 1]``, and how many keys every sample has,
                ``[B, 1]``; called only where the parameter has no value yet.
        """
        value = self.value[None, :, None, None]
        if self._begun():
            return value
        if not self.training:
            return torch.where(self.known, value, closed_form()[0].to(value.dtype))
        with torch.no_grad():
            start, usable = self._average(*closed_form())
            self.value.copy_(torch.where(usable & ~self.known, start, self.value))
            self.known.logical_or_(usable)
        return self.value[None, :, None, None]

    def _begun(self) -> bool:
        if not self._has_begun and not is_compiling() and values_are_readable(self.known):
            self._has_begun = bool(self.known)
        return self._has_begun

    def _average(self, offset: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The mean over the samples of all processes, and whether there is one."""
        there = (keys > 0).float()
        own = torch.where(there > 0, offset[..., 0, 0].float(), 0.0).expand(keys.shape[0], -1)
        sums = torch.cat([own.sum(0), there.sum()[None]])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        return sums[:-1] / sums[-1].clamp_min(1), (sums[-1] > 0) & sums.isfinite().all()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Look at ``known`` again after it was loaded."""
        super()._load_from_state_dict(*args, **kwargs)
        self._has_begun = False


Offset = MatchedOffset | FixedOffset | LearnedOffset


def make_offset(
    offset: float | Tensor | None,
    is_learned: bool,
    num_heads: int,
    device: torch.device | str | None = None,
) -> Offset:
    """Build the source of the offset: a number or H values; None = the closed form."""
    checks.check_flag("learn_offset", is_learned)
    if isinstance(offset, (str, bool)):
        raise InvalidInputError(
            f"offset must be a number, have one value per head ({num_heads}) or be None, got "
            f"{shown(offset)}; learn_offset=True makes it a parameter."
        )
    if is_learned:
        return LearnedOffset(num_heads, offset, device=device)
    if offset is None:
        return MatchedOffset()
    return FixedOffset(num_heads, offset, device=device)


def numbers_of_call(
    statistics: nn.Module,
    offset: Offset,
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None,
    matching: str,
    impl: str,
) -> tuple[Temperature, Temperature, Tensor | None]:
    """α, β and the offset of one call; None = `lln.lln_keys_attention` matches it to the sample.

    ``statistics`` is the source of α and β (`lln.nn.temperatures`), ``impl`` measures the moments.
    """
    width = query.shape[-1]
    moments: Moments | None = None
    if isinstance(statistics, RunningStatistics):
        moments = statistics.moments(query, key, key_mask, False)
        alpha, beta = keys_temperatures(moments, width, matching)
    elif isinstance(statistics, SampleStatistics):
        alpha = beta = None
    else:
        alpha, beta = statistics(query, key, key_mask)

    def closed_form() -> tuple[Tensor, Tensor]:
        found = moments
        if found is None:
            with torch.no_grad(), without_autocast(query):
                found = measured_moments(query, key, key_mask, impl)
        spread, other = alpha, beta
        if spread is None or other is None:
            spread, other = keys_temperatures(found, width, matching)
        return mass_offset(found, spread, other, width), found.keys

    if isinstance(offset, FixedOffset):
        return alpha, beta, offset()
    if isinstance(offset, LearnedOffset):
        return alpha, beta, offset(closed_form)
    return alpha, beta, None if moments is None else closed_form()[0]
