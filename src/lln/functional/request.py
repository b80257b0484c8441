"""The arguments of a checked call in one object, which is then planned and run.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width,
E value width, n packed sequences.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from lln.eager.key_blocks import fit_blocks
from lln.kernels.keys.lists import Lists


class Request(NamedTuple):
    """A call of attention.

    Attributes:
        kind: ``"lln"``, ``"diag"``, ``"lln_diag"`` or ``"lln_keys"``.
        query: ``[B, H, T, D]``, or packed ``[T, H, D]``.
        key: ``[B, Hk, S, D]``, or packed ``[T, Hk, D]``.
        value: ``[B, Hk, S, E]``, or packed ``[T, Hk, E]``.
        alpha: A number, or broadcasts to ``[B, H, 1, 1]`` (packed: ``[n, H, 1, 1]``); None = from
            ``matching``.
        beta: Likewise, or per key head.
        matching: Where α and β come from if they are not given.
        mix: Weight of the LLN part of ``"lln_diag"``; broadcasts to the output.
        block_size: Tokens in a diagonal block; 0 = there is no diagonal part.
        scale: Factor of the diagonal part's scores; None = 1/√D.
        key_mask: bool ``[B, S]``, True = attend.
        dropout_p: Probability to drop a key.
        is_causal: Whether row i sees keys 0 … i only.
        bounds: ``cu_seqlens`` ``[n + 1]`` of packed sequences; None = dense.
        longest: Length of the longest packed sequence, or more; None = unknown.
        keys: Of ``"lln_keys"``: how many keys to choose per group of queries, or their indices
            ``[B, H, G, K]`` (packed: ``[H, G, K]``); once chosen by query for the kernels, lists.
        select: How keys are chosen: ``"block"`` or ``"query"``.
        group_size: Queries that share their chosen keys.
        offset: What is added to the logits of the slots; a number, or broadcasts to
            ``[B, H, 1, 1]``; None = by mass matching.
    """

    kind: str
    query: Tensor
    key: Tensor
    value: Tensor
    # float | Tensor | None, but not None after matching.
    alpha: Any = None
    beta: Any = None
    matching: str = "variance"
    mix: float | Tensor = 1.0
    block_size: int = 0
    scale: float | None = None
    key_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    bounds: Tensor | None = None
    longest: int | None = None
    keys: int | Tensor | Lists = 0
    select: str = "block"
    group_size: int = 0
    offset: Any = None

    def fitted(self, tokens: int) -> Request:
        """With blocks that do not reach far beyond the longest sequence, of so many tokens."""
        size, group = fit_blocks(self.block_size, self.group_size or 1, tokens)
        if size == self.block_size:
            return self
        # Written out, because torch.compile can trace the constructor in all versions.
        group = group if self.group_size else 0
        return Request(*self[:8], size, *self[9:17], group, self.offset)

    @property
    def mix_learns(self) -> bool:
        """Whether mix needs a gradient; the same in both runs of a checkpointed forward."""
        return isinstance(self.mix, Tensor) and self.mix.requires_grad

    @property
    def mix_has_channels(self) -> bool:
        """Whether mix differs from channel to channel."""
        return isinstance(self.mix, Tensor) and self.mix.dim() > 0 and self.mix.shape[-1] != 1
