"""The arguments that all instruments share: written, documented and checked once, here.

Dimension legend: B samples (or packed sequences), H query heads, Hk key heads, T queries, S keys,
D head width.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from lln import checks
from lln.checks.bounds import check_cu_seqlens
from lln.checks.names import check_choice
from lln.errors import InvalidInputError

KINDS = ("softmax", "lln", "diag", "lln_diag")


@dataclass(frozen=True, eq=False, repr=False)
class AttentionInputs:
    """An attention to measure: the arguments of every instrument.

    Args:
        query: ``[B, H, T, D]``; ``[T, H, D]`` with ``cu_seqlens``.
        key: ``[B, Hk, S, D]``, H a multiple of Hk (grouped queries), or ``[T, Hk, D]``.
        kind: The attention that makes P: ``"softmax"``, ``"lln"``, ``"diag"`` (block-diagonal
            softmax) or ``"lln_diag"`` (Figure 3).
        alpha: α of the LLN part, a positive number or a tensor that broadcasts to
            ``[B, H, 1, 1]``; None = matched to the inputs, as `lln.lln_attention` does. Kinds
            without an LLN part do not read it.
        beta: Likewise; also ``[B, Hk, 1, 1]``.
        matching: The criterion when α and β are not given: ``"variance"``, ``"entropy"`` or
            ``"paper"``.
        block_size: Tokens in a diagonal block; None = D. Kinds without a diagonal part do not
            read it.
        mix: Weight of the LLN part in ``"lln_diag"``: a number in [0, 1], or a tensor that
            broadcasts to ``[B, H, T, 1]``.
        key_mask: bool ``[B, S]``, True = attend. If T = S, padded queries do not count either.
        is_causal: Whether row i sees keys 0 … i only. LLN kinds then need α and β.
        scale: Factor of the softmax scores; None = 1/√D.
        cu_seqlens: int ``[n + 1]``, boundaries of packed sequences; B is then n.
    """

    query: Tensor
    key: Tensor
    _: KW_ONLY
    kind: str = "softmax"
    alpha: float | Tensor | None = None
    beta: float | Tensor | None = None
    matching: str = "variance"
    block_size: int | None = None
    mix: float | Tensor = 0.5
    key_mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    cu_seqlens: Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse what does not fit, in one sentence."""
        packed = self.cu_seqlens is not None
        query, key = self.query, self.key
        checks.check_qkv(query, key, key, layout="packed" if packed else "dense", enable_gqa=True)
        check_choice("kind", self.kind, KINDS)
        if self.cu_seqlens is not None:
            check_cu_seqlens(self.cu_seqlens, query.shape[0], query.device)
            if self.key_mask is not None:
                raise InvalidInputError(
                    "key_mask and cu_seqlens cannot be combined: packed sequences carry no "
                    "padding; drop the masked tokens before packing."
                )
        else:
            checks.check_key_mask(self.key_mask, key)
            checks.check_causal(self.is_causal, query.shape[2], key.shape[2])
            if self.kind in ("diag", "lln_diag"):
                checks.check_self_attention(query, key, f"kind {self.kind!r}")
        if self.block_size is not None:
            checks.check_block_size(self.block_size)
        checks.check_scale(self.scale)
        checks.check_mix(self.mix, (*query.shape[:-1], 1), query.device)
        mix = torch.as_tensor(self.mix)
        if not bool(((mix >= 0) & (mix <= 1)).all()):
            raise InvalidInputError("mix must lie in [0, 1] everywhere for P to be row-stochastic.")
        if self.kind in ("lln", "lln_diag"):
            checks.check_options(
                query,
                key,
                self.batch,
                alpha=self.alpha,
                beta=self.beta,
                matching=self.matching,
                dropout_p=0.0,
                is_causal=self.is_causal,
            )

    @property
    def batch(self) -> int:
        """B."""
        return self.query.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def is_square(self) -> bool:
        """Whether P has as many rows as columns."""
        return self.cu_seqlens is not None or self.query.shape[2] == self.key.shape[2]
