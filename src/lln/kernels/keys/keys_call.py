"""A call of attention with exact keys, as its launches pass it around.

Dimension legend: see `lln.kernels.keys.launch_keys`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.eager.key_blocks import blocks_in
from lln.kernels.keys.launch_choice import gaps_before
from lln.kernels.launching.kernel_arguments import flat_beta, flat_scale, mask_bytes
from lln.kernels.summaries.lln_call import LLNCall

# Log-mass, centroid and mean key.
Summary = tuple[Tensor, Tensor, Tensor]


class Outside(NamedTuple):
    """A summary of more keys than a call's own, and where the chosen ones lie.

    Blocks of such a call begin with its first token, and its key and value have S ≥ T rows: what
    groups chose lies behind the T tokens, and only there.

    Attributes:
        log_mass: ``[B, SH, D]`` in float32, less β times the mean key; contiguous.
        centroid: ``[B, SH, D, E]`` in the dtype of value; contiguous.
        centre: ``[B, SH, D]`` in float32, the mean key; contiguous.
        held: int32 ``[B]``, how many keys it holds, with a mask; None = ``number``.
        number: How many keys it holds, without a mask.
    """

    log_mass: Tensor
    centroid: Tensor
    centre: Tensor
    held: Tensor | None
    number: int

    @property
    def summary(self) -> Summary:
        """What the queries read."""
        return self.log_mass, self.centroid, self.centre


class KeysCall(NamedTuple):
    """One call; what is not said here is as in `lln.kernels.summaries.lln_call.LLNCall`.

    Attributes:
        offset: 4-D; None = ``offset_number``.
        indices: int32 ``[B, H, G, K]``, contiguous; -1 = none.
        mask: bool ``[B, T]`` or None.
        offset_number: The offset where it is one number.
        block_size: W, a power of two.
        group_size: Queries in a group, a power of two.
        scale: Factor of the scores.
        outside: A summary of other keys too; None = that of the call's own.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    alpha: Tensor | None
    beta: Tensor | None
    offset: Tensor | None
    indices: Tensor
    mask: Tensor | None
    alpha_number: float
    beta_number: float
    offset_number: float
    block_size: int
    group_size: int
    scale: float
    outside: Outside | None = None

    @property
    def as_lln(self) -> LLNCall:
        """The call of LLN attention whose summary this one reads."""
        tensors = (self.query, self.key, self.value, self.alpha, self.beta, self.mask)
        return LLNCall(*tensors, alpha_number=self.alpha_number, beta_number=self.beta_number)

    @property
    def blocks(self) -> int:
        """N."""
        is_shifted = self.mask is not None and self.outside is None
        return blocks_in(self.query.shape[2], self.block_size, is_shifted)

    @property
    def groups(self) -> int:
        """G."""
        return self.blocks * (self.block_size // self.group_size)

    @property
    def rows_behind(self) -> int:
        """Into how many parts of W rows those behind the tokens are cut."""
        return -((self.query.shape[2] - self.key.shape[2]) // self.block_size)

    @property
    def summary_heads(self) -> int:
        """SH."""
        if self.outside is not None:
            return self.outside.log_mass.shape[1]
        return self.as_lln.summary_heads

    @property
    def held(self) -> int:
        """How many keys the summary holds, without a mask."""
        return self.query.shape[2] if self.outside is None else self.outside.number

    @property
    def options(self) -> tuple[Hashable, ...]:
        """What the kernels depend on besides how the tensors lie in memory, in `runtime` too."""
        given = (self.alpha, self.beta, self.offset, self.mask, self.outside)
        numbers = (self.block_size, self.group_size, self.scale, self.held, self.summary_heads)
        return *[side is None for side in given], *numbers

    def runtime(self, **others: Tensor) -> dict[str, Any]:
        """The arguments that differ from call to call, by their names in the kernels."""
        batch, query = self.query.shape[0], self.query
        mask, gaps, held = self.masking
        return {
            "p_q": query,
            "p_k": self.key,
            "p_v": self.value,
            "p_chosen": self.indices,
            "p_mask": mask,
            "p_gaps": gaps,
            "p_held": held,
            "p_alpha": flat_scale(self.alpha, batch, query),
            "p_beta": flat_beta(self.beta, self.summary_heads, batch, query),
            "p_offset": flat_scale(self.offset, batch, query),
            "alpha": self.alpha_number,
            "beta": self.beta_number,
            "offset": self.offset_number,
            **others,
        }

    @property
    def masking(self) -> tuple[Tensor, Tensor, Tensor]:
        """The mask as bytes, where the first blocks begin, and how many keys a sample has."""
        mask, query = self.mask, self.query
        if mask is None:
            return query, query, query
        if self.outside is not None:
            assert self.outside.held is not None
            gaps = torch.zeros_like(self.outside.held)
            return mask_bytes(mask, query), gaps, self.outside.held
        held = mask.sum(-1, dtype=torch.int32)
        return mask_bytes(mask, query), gaps_before(mask, self.block_size), held
