"""Sparse Transformer: a band or a block, and a few tokens of everywhere else.

Dimension legend: B batch, H heads, N tokens, D head width, l stride, G blocks of l tokens.
"""

import math

import torch
from torch import Tensor

from lln.checks import check_count
from lln.checks.names import check_choice
from lln.errors import InvalidInputError
from lln_lab.peers.masked import masked_softmax, softmax_matrix
from lln_lab.peers.peer import Card, Host, Mask, WideCore, real_tokens, visible
from lln_lab.peers.token_blocks import cut, with_neighbours

PATTERNS = ("strided", "fixed")


class SparseTransformer(WideCore):
    """One softmax over a token's near keys and its far keys, without an N×N matrix.

        strided:  |i − j| < l                or  (i − j) mod l = 0
        fixed:    ⌊i/l⌋ = ⌊j/l⌋  or  j among the last c tokens of its block of l

    An encoder sees both sides; ``is_causal=True`` adds j ≤ i, as in the paper.

    Args:
        pattern: ``"strided"`` or ``"fixed"``.
        stride: l; None = ⌈√max_len⌉.
        summary: c, of the fixed pattern; None = 8 as in the paper, l // 8 but at least 1 where
            l < 64.
    """

    card = Card(
        name="sparse_transformer",
        title="Sparse Transformer",
        citation="Child et al. 2019, arXiv 1904.10509",
        equation="P_ij ∝ exp(q_i·k_j/√d) where |i−j| < l or (i−j) mod l = 0 (strided); in the "
        "same block of l or j among a block's last c (fixed)",
        complexity="O(N (l + N/l) d) strided, O(N (l + cN/l) d) fixed; O(N √N d) at l = √N",
        is_linear=False,
        oracle="dense mask form",
        departures="Both parts of a pattern share one softmax in every head (the paper's merged "
        "head); without is_causal the patterns lose j ≤ i, which the paper has throughout.",
    )

    def __init__(
        self,
        host: Host,
        *,
        pattern: str = "strided",
        stride: int | None = None,
        summary: int | None = None,
    ) -> None:
        super().__init__(host)
        check_choice("pattern", pattern, PATTERNS)
        self.pattern = pattern
        self.stride = math.isqrt(host.max_len - 1) + 1 if stride is None else stride
        check_count("stride", self.stride)
        self.summary = min(8, max(1, self.stride // 8)) if summary is None else summary
        check_count("summary", self.summary)
        if self.summary > self.stride:
            raise InvalidInputError(
                f"summary must be at most the stride, {self.stride}, got {self.summary}."
            )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask) -> Tensor:
        scaled = query / math.sqrt(query.shape[-1])
        blocks_q, blocks_k, blocks_v = (cut(side, self.stride) for side in (scaled, key, value))
        real = cut(real_tokens(query[:1], key_mask), self.stride, dim=-1).unsqueeze(1)
        attend = self._strided if self.pattern == "strided" else self._fixed
        out = attend(blocks_q, blocks_k, blocks_v, real)
        return out.flatten(-3, -2)[..., : query.shape[-2], :]

    def matrix(self, query: Tensor, key: Tensor, key_mask: Mask = None) -> Tensor:
        place = torch.arange(query.shape[-2], device=query.device)
        row, column = place[:, None], place[None, :]
        if self.pattern == "strided":
            allowed = ((row - column).abs() < self.stride) | ((row - column) % self.stride == 0)
        else:
            is_summary = column % self.stride >= self.stride - self.summary
            allowed = (row // self.stride == column // self.stride) | is_summary
        seen = visible(query, key_mask, self.host.is_causal, among=allowed)
        return softmax_matrix(query, key, seen)

    def _strided(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor) -> Tensor:
        """``[B, H, G, l, D]`` of query (scaled), key and value; real ``[B, 1, G, l]``."""
        count, stride = query.shape[-3:-1]
        offset = torch.arange(stride, device=query.device)
        block = torch.arange(count, device=query.device)
        # From a query's place in its block to a key's place in the three blocks around.
        distance = torch.arange(-stride, 2 * stride, device=query.device) - offset[:, None]
        band = distance.abs() < stride
        # Not the own block: the token itself is in the band already.
        other = block[:, None] != block
        if self.host.is_causal:
            band = band & (distance <= 0)
            other = block[:, None] > block
        near_real = with_neighbours(real.unsqueeze(-1)).mT
        # Tokens of one residue mod l are a column of the grid of blocks.
        column_q, column_k, column_v = (side.transpose(-3, -2) for side in (query, key, value))
        near, far = self._weights(
            query @ with_neighbours(key).mT,
            band & near_real,
            (column_q @ column_k.mT).transpose(-3, -2),
            other[:, None, :] & real.mT.unsqueeze(-3),
        )
        across = (far.transpose(-3, -2) @ column_v).transpose(-3, -2)
        return near @ with_neighbours(value) + across

    def _fixed(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor) -> Tensor:
        """Like `_strided`."""
        count, stride = query.shape[-3:-1]
        last = slice(stride - self.summary, None)
        block = torch.arange(count, device=query.device)
        home = block.repeat_interleave(self.summary)
        own = real.unsqueeze(-2)
        # Not the own block: its summary is seen as part of the block.
        other = block[:, None] != home
        if self.host.is_causal:
            own = own & torch.ones(stride, stride, dtype=torch.bool, device=query.device).tril()
            other = block[:, None] > home
        summary_real = real[..., last].flatten(-2)[..., None, None, :]
        summary_k, summary_v = (side[..., last, :].flatten(-3, -2) for side in (key, value))
        far_scores = query.flatten(-3, -2) @ summary_k.mT
        near, far = self._weights(
            query @ key.mT,
            own.expand(*own.shape[:-2], stride, stride),
            far_scores.unflatten(-2, (count, stride)),
            (other[:, None, :] & summary_real).expand(-1, -1, -1, stride, -1),
        )
        across = (far.flatten(-3, -2) @ summary_v).unflatten(-2, (count, stride))
        return near @ value + across

    @staticmethod
    def _weights(
        near: Tensor, near_allowed: Tensor, far: Tensor, far_allowed: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One softmax over both sets of scores, ``[B, H, G, l, keys]`` each."""
        weights = masked_softmax(
            torch.cat((near, far), -1), torch.cat((near_allowed, far_allowed), -1)
        )
        return weights[..., : near.shape[-1]], weights[..., near.shape[-1] :]
