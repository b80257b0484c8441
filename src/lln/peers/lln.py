"""LLN and LLN+Diag, the systems all others are compared with, behind the same interface."""

from typing import Any, ClassVar

from torch import Tensor

from lln import reference
from lln.errors import InvalidInputError
from lln.nn.heads import LLNCore, LLNDiagCore
from lln.peers.block_diagonal import block_matrix
from lln.peers.peer import Card, Core, Host, Mask, visible
from lln.precision import accumulation_dtype


class LLN(Core):
    """LLN attention: P_ij ∝ ⟨e^{αq_i}, e^{βk_j}⟩, Eq. (8), with α, β matched to softmax.

    Args:
        matching: Criterion of matching: ``"variance"``, ``"entropy"`` or ``"paper"`` (the
            constants of the authors' code over the whole tensor, so that a sample
            depends on the others of its batch).
        statistics: ``"sample"``, ``"running"``, ``"fixed"`` or ``"learned"`` (see
            `lln.nn.heads.LLNCore`). None = ``"sample"``, and ``"running"`` in a causal layer, where
            statistics of the own sequence would show rows the future.
        alpha: Value of ``"fixed"``, start of ``"learned"``; None = matched to unit variances.
        beta: Likewise.
        momentum: Weight of a new batch in ``"running"``.
        impl: As in `lln.lln_attention`.
    """

    attention_class: ClassVar[type[LLNCore]] = LLNCore

    card = Card(
        name="lln",
        title="Linear Log-Normal attention",
        citation="Nahshan et al. 2023, arXiv 2311.13541",
        equation="P_ij ∝ Σ_c e^{α q_ic + β k_jc}; α, β such that Var log P is softmax's",
        complexity="O(N d²)",
        equivariant=True,
        oracle="dense form; the tests of lln.lln_attention",
        departures="α, β per sample and head over real tokens, where the authors' code takes one "
        "pair from the whole tensor, padding and batch-mates included (matching='paper': one pair "
        "from all real tokens); causal layers use running statistics",
    )

    def __init__(
        self,
        host: Host,
        *,
        matching: str = "variance",
        statistics: str | None = None,
        alpha: float | Tensor | None = None,
        beta: float | Tensor | None = None,
        momentum: float = 0.1,
        impl: str = "auto",
        # What the attention class of a subclass takes besides.
        **own: Any,
    ) -> None:
        super().__init__(host)
        if statistics is None:
            statistics = "running" if host.is_causal else "sample"
        if statistics == "sample" and host.is_causal:
            raise InvalidInputError(
                "statistics='sample' would show rows of a causal layer the future; use 'running', "
                "'fixed' or 'learned'."
            )
        self.attention = self.attention_class(
            host.num_heads,
            host.head_dim,
            matching=matching,
            statistics=statistics,
            alpha=alpha,
            beta=beta,
            momentum=momentum,
            impl=impl,
            **own,
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask = None) -> Tensor:
        return self.attention(query, key, value, key_mask=key_mask, is_causal=self.host.is_causal)

    def matrix(self, query: Tensor, key: Tensor, key_mask: Mask = None) -> Tensor:
        """P of the LLN part, ``[B, H, N, N]``; running statistics are read, not updated."""
        source = self.attention.statistics
        was_training = source.training
        source.eval()
        alpha, beta = source(query, key, key_mask, self.host.is_causal)
        source.train(was_training)
        keep = visible(query, key_mask, self.host.is_causal)
        matrix = reference.lln_matrix(query, key, alpha, beta, keep=keep)
        return matrix.to(accumulation_dtype(query.dtype))


class LLNDiag(LLN):
    """The layer of Figure 3: the mean of LLN and block-diagonal softmax attention.

    Args:
        block_size: Tokens in a diagonal block.
        impl: As in `lln.lln_diag_attention`.
    """

    attention_class = LLNDiagCore

    card = Card(
        name="lln_diag",
        title="LLN+Diag",
        citation="Nahshan et al. 2023, arXiv 2311.13541",
        equation="P = (P_lln + P_diag) / 2",
        complexity="O(N d² + N b d)",
        oracle="dense form; the tests of lln.lln_diag_attention",
        departures="as lln; blocks of 64 tokens, where the authors' code takes the head width",
    )

    def __init__(self, host: Host, *, block_size: int = 64, **matching: Any) -> None:
        super().__init__(host, block_size=block_size, **matching)
        self.block_size = block_size

    def matrix(self, query: Tensor, key: Tensor, key_mask: Mask = None) -> Tensor:
        short_range = block_matrix(query, key, self.block_size, key_mask, self.host.is_causal)
        return 0.5 * (super().matrix(query, key, key_mask) + short_range)
