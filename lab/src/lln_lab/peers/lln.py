"""LLN, alone, with diagonal blocks and with exact keys, behind the interface of all systems."""

from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from lln import reference
from lln.checks.call import fit_blocks
from lln.checks.key_options import check_group_size
from lln.checks.names import check_choice
from lln.errors import InvalidInputError
from lln.functional.exact_keys import choose_keys
from lln.matching.mass import keys_temperatures, mass_offset
from lln.matching.moments import head_moments
from lln.nn.heads import LLNCore, LLNDiagCore
from lln.nn.key_heads import LLNKeysCore
from lln.nn.offsets import numbers_of_call
from lln.precision import accumulation_dtype
from lln_lab.peers.block_diagonal import block_matrix
from lln_lab.peers.peer import Card, Core, Host, Mask, visible

_JOINS = ("average", "ratio", "gate", "heads")


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
        join: ``"average"``, as in the paper; ``"ratio"``, a learned share per head and channel,
            for which there is no `matrix`; ``"gate"``, a learned share per token and head; or
            ``"heads"``, half of the heads LLN and half block-diagonal (see `lln.LLNDiagCore`).
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

    def __init__(
        self, host: Host, *, block_size: int = 64, join: str = "average", **matching: Any
    ) -> None:
        check_choice("join", join, _JOINS)
        super().__init__(host, block_size=block_size, join=join, **matching)
        self.block_size, self.join = block_size, join

    def matrix(self, query: Tensor, key: Tensor, key_mask: Mask = None) -> Tensor:
        if self.join == "ratio":
            raise InvalidInputError(
                "join='ratio' has a matrix per channel; take join='average', 'gate' or 'heads'."
            )
        long_range = super().matrix(query, key, key_mask)
        short_range = block_matrix(query, key, self.block_size, key_mask, self.host.is_causal)
        share = self._share(query).to(long_range.dtype)
        return share * long_range + (1 - share) * short_range

    def _share(self, query: Tensor) -> Tensor:
        """Of LLN in every row, ``[B, H, N, 1]`` or less."""
        core = cast("LLNDiagCore", self.attention)
        if self.join == "gate":
            return torch.sigmoid(
                (query * core.gate_weight[:, None]).sum(-1, keepdim=True)
                + core.gate_bias[:, None, None]
            )
        if self.join == "heads":
            return (torch.arange(core.num_heads, device=query.device) < core.lln_heads)[
                :, None, None
            ]
        return query.new_tensor(0.5)


class LLNKeys(LLN):
    """Near tokens, chosen keys and LLN slots under one softmax: `lln.lln_keys_attention`.

    Args:
        keys: How many keys outside its block a group of queries sees one by one.
        block_size: Tokens in a block.
        group_size: Queries that share their keys (see `lln.choose_keys`); None = a block.
        offset: What puts the slots on the scale of softmax scores: a number or one value per head;
            None = the closed form in every call.
        learn_offset: Whether the offset is a parameter that starts at ``offset``, or at the closed
            form of the first batch.
        matching: ``"rest"``, half of what ``"entropy"`` gives, or as in ``lln``.
    """

    attention_class = LLNKeysCore

    card = Card(
        name="lln_keys",
        title="LLN with exact keys",
        citation="This library; the summary is that of Nahshan et al. 2023, arXiv 2311.13541",
        equation="softmax over [q·k/√d of the own block | of K chosen keys | αq_f + L_f + g of the "
        "d slots]",
        complexity="O(N²d/b + N (b + K + d) d)",
        is_linear=False,
        causal=False,
        repeats_on_gpu=False,
        oracle="dense form; the tests of lln.lln_keys_attention",
        adds="none; one offset per head with learn_offset",
    )

    def __init__(
        self,
        host: Host,
        *,
        keys: int = 64,
        block_size: int = 64,
        group_size: int | None = None,
        offset: float | Tensor | None = None,
        learn_offset: bool = False,
        matching: str = "rest",
        **options: Any,
    ) -> None:
        super().__init__(
            host,
            keys=keys,
            block_size=block_size,
            group_size=group_size,
            offset=offset,
            learn_offset=learn_offset,
            matching=matching,
            **options,
        )

    def matrix(self, query: Tensor, key: Tensor, key_mask: Mask = None) -> Tensor:
        core = self.attention
        assert isinstance(core, LLNKeysCore)
        was_training = core.training
        core.eval()
        sides = (query, key, key_mask, core.matching, core.impl)
        alpha, beta, offset = numbers_of_call(core.statistics, core.offset, *sides)
        core.train(was_training)
        moments = head_moments(query, key, key_mask)
        if alpha is None or beta is None:
            alpha, beta = keys_temperatures(moments, query.shape[-1], core.matching)
        if offset is None:
            offset = mass_offset(moments, alpha, beta, query.shape[-1])
        tokens = query.shape[-2]
        group = check_group_size(core.group_size, core.block_size)
        block_size, group = fit_blocks(core.block_size, group, tokens)
        choice = {"block_size": block_size, "key_mask": key_mask}
        indices = choose_keys(query, key, core.keys, group_size=group, **choice)
        keep = visible(query, key_mask, False)
        exact = reference.exact_pairs(indices, tokens, block_size, group, keep=keep)
        matrix = reference.lln_keys_matrix(query, key, alpha, beta, exact, offset, keep=keep)
        return matrix.to(accumulation_dtype(query.dtype))
