"""The arguments that all instruments share: written, documented and checked once, here.

Dimension legend: B samples (or packed sequences), H query heads, Hk key heads, T queries, S keys,
D head width, G groups of queries, K chosen keys per group.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from lln import checks
from lln.checks.call import Call, fit_blocks
from lln.checks.key_options import check_group_size
from lln.checks.names import check_choice
from lln.errors import InvalidInputError
from lln.functional.checked_call import checked_call, checked_packed_call

KINDS = ("softmax", "lln", "diag", "lln_diag", "window", "lln_keys")

# Tokens in a block of `lln.lln_keys_attention` unless told otherwise.
_KEYS_BLOCK = 64


@dataclass(frozen=True, eq=False, repr=False)
class AttentionInputs:
    """An attention to measure: the arguments of every instrument.

    Args:
        query: ``[B, H, T, D]``; ``[T, H, D]`` with ``cu_seqlens``.
        key: ``[B, Hk, S, D]``, H a multiple of Hk (grouped queries), or ``[T, Hk, D]``.
        kind: The attention that makes P: ``"softmax"``, ``"lln"``, ``"diag"`` (block-diagonal
            softmax), ``"lln_diag"`` (Figure 3), ``"window"`` (`lln.window_attention`) or
            ``"lln_keys"`` (`lln.lln_keys_attention`).
        alpha: α of the LLN part, a positive number or a tensor that broadcasts to
            ``[B, H, 1, 1]``; None = matched to the inputs, as `lln.lln_attention` does. Kinds
            without an LLN part do not read it.
        beta: Likewise; also ``[B, Hk, 1, 1]``.
        matching: The criterion when α and β are not given: ``"variance"``, ``"entropy"``,
            ``"paper"`` or, for ``"lln_keys"``, ``"rest"``. None = ``"variance"``; ``"rest"`` for
            ``"lln_keys"``.
        block_size: Tokens in a diagonal block; None = D, and 64 for ``"lln_keys"``. Kinds without
            blocks do not read it.
        mix: Weight of the LLN part in ``"lln_diag"``: a number in [0, 1], or a tensor that
            broadcasts to ``[B, H, T, 1]``.
        key_mask: bool ``[B, S]``, True = attend. If T = S, padded queries do not count either.
        is_causal: Whether row i sees keys 0 … i only. LLN kinds then need α and β;
            ``"lln_keys"`` refuses it.
        scale: Factor of the softmax scores; None = 1/√D.
        cu_seqlens: int ``[n + 1]``, boundaries of packed sequences; B is then n.
        keys: How many keys every group of queries sees one by one in ``"lln_keys"``, or their
            indices ``[B, H, G, K]`` (packed: ``[H, G, K]``) as `lln.choose_keys` returns them.
            Only ``"lln_keys"`` reads this and the next two.
        group_size: Queries that share their chosen keys; None = a block.
        offset: What is added to the logits of the slots, a number or a tensor that broadcasts to
            ``[B, H, 1, 1]``; None = by mass matching, as `lln.lln_keys_attention` does.
        window: How many tokens ``"window"`` sees before a query, and behind it if not causal; other
            kinds do not read it.
    """

    query: Tensor
    key: Tensor
    _: KW_ONLY
    kind: str = "softmax"
    alpha: float | Tensor | None = None
    beta: float | Tensor | None = None
    matching: str | None = None
    block_size: int | None = None
    mix: float | Tensor = 0.5
    key_mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    cu_seqlens: Tensor | None = None
    keys: int | Tensor = 64
    group_size: int | None = None
    offset: float | Tensor | None = None
    window: int = 64

    def __post_init__(self) -> None:
        """Refuse what does not fit, in one sentence."""
        check_choice("kind", self.kind, KINDS)
        if self.cu_seqlens is None:
            checked_call(self.call, f"kind {self.kind!r}", enable_gqa=True)
        else:
            checked_packed_call(self.call, None, enable_gqa=True)
        if self.block_size is not None:
            checks.check_block_size(self.block_size)
        checks.check_count("window", self.window, least=0)
        checks.check_scale(self.scale)
        checks.check_mix(self.mix, (*self.query.shape[:-1], 1), self.query.device)
        mix = torch.as_tensor(self.mix)
        if not bool(((mix >= 0) & (mix <= 1)).all()):
            raise InvalidInputError("mix must lie in [0, 1] everywhere for P to be row-stochastic.")

    @property
    def call(self) -> Call:
        """The call that this attention is, or for softmax one that takes the same tensors."""
        kind, numbers = self.kind, (self.alpha, self.beta, self.criterion)
        if kind == "softmax":
            kind, numbers = "lln", (1.0, 1.0, "variance")
        names = ("scale", "key_mask", "is_causal", "keys", "group_size", "offset")
        options = {name: getattr(self, name) for name in names}
        options["block_size"] = _KEYS_BLOCK if self.block_size is None else self.block_size
        options["window"] = self.window if kind == "window" else 0
        sides = (self.query, self.key, self.key)
        return Call(kind, *sides, *numbers, bounds=self.cu_seqlens, **options)

    @property
    def criterion(self) -> str:
        """The criterion of matching."""
        if self.matching is not None:
            return self.matching
        return "rest" if self.kind == "lln_keys" else "variance"

    @property
    def tokens_in_block(self) -> int:
        """Tokens in a diagonal block."""
        return self._sizes[0]

    @property
    def queries_in_group(self) -> int:
        """Queries that share their chosen keys."""
        return self._sizes[1]

    @property
    def _sizes(self) -> tuple[int, int]:
        """Of blocks and groups, as the attention fits them to the sequence."""
        size = self.block_size
        if size is None:
            size = _KEYS_BLOCK if self.kind == "lln_keys" else self.query.shape[-1]
        tokens = self.query.shape[-2]
        if self.cu_seqlens is not None:
            tokens = int(self.cu_seqlens.diff().max()) if self.batch else 0
        return fit_blocks(size, check_group_size(self.group_size, size), tokens)

    @property
    def batch(self) -> int:
        """B."""
        return self.query.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def is_square(self) -> bool:
        """Whether P has as many rows as columns."""
        return self.cu_seqlens is not None or self.query.shape[2] == self.key.shape[2]
