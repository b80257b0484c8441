"""Transformer-LS: a window of neighbours and a learned summary of all tokens in one softmax.

Dimension legend: B batch, H heads, N tokens, D head width, r landmarks, w tokens of a block,
n blocks, K keys that a block looks at.
"""

import math

import torch
from torch import Tensor, nn

from lln.checks import check_count
from lln.precision import accumulation_dtype, without_autocast
from lln_lab.peers.peer import Card, Host, Mask, Peer, real_tokens
from lln_lab.peers.projections import join_heads, split_heads, square_maps
from lln_lab.peers.token_blocks import cut, windows


class TransformerLS(Peer):
    """Long-short attention, bidirectional.

        K = LN_l(W_k x), V = LN_l(W_v x), P = softmax over tokens of W_p x
        K̄ = LN_s(Pᵀ K), V̄ = LN_s(Pᵀ V), head by head, r rows; the norms over all heads
        O = softmax(Q [K̄; K_window]ᵀ/√d) [V̄; V_window]

    Tokens of block ⌊i/w⌋ share one window: the block and w/2 tokens (at least 1) on each side.
    The norm between values and summary leaves no N×N matrix that would give O from V.

    Args:
        window: w.
        landmarks: r; 0 leaves the window alone.
    """

    card = Card(
        name="transformer_ls",
        title="Transformer-LS",
        kind="mixer",
        citation="Zhu et al. 2021, arXiv 2107.02192",
        equation="P = softmax(Q [LN(PᵀK); K_window]ᵀ/√d), P = softmax over tokens of W_p x",
        complexity="O(N (2w + r) d)",
        causal=False,
        row_stochastic=False,
        adds="query, key, value and output projections; two LayerNorms; W_p of H·r columns",
        departures="W_p has no bias, which the softmax over tokens would cancel; no CLS token kept "
        "apart; any length, where published code wants a multiple of w. The RoBERTa run behind "
        "Table 1 ignores padding: give no key_mask to reproduce it",
    )

    def __init__(self, host: Host, *, window: int = 8, landmarks: int = 32) -> None:
        super().__init__(host)
        check_count("window", window)
        check_count("landmarks", landmarks, least=0)
        self.window, self.landmarks = window, landmarks
        width = host.embed_dim
        self.query, self.key, self.value, self.out = square_maps(width, 4)
        self.long_norm = nn.LayerNorm(width)
        if landmarks:
            self.summary = nn.Linear(width, host.num_heads * landmarks, bias=False)
            self.short_norm = nn.LayerNorm(width)

    def mix(self, x: Tensor, key_mask: Mask) -> Tensor:
        query = self._split(self.query(x))
        key, value = (self._split(self.long_norm(p(x))) for p in (self.key, self.value))
        key_mask = real_tokens(x, key_mask)
        few = self._compress(x, key, value, key_mask) if self.landmarks else None
        with without_autocast(x):
            wide = accumulation_dtype(x.dtype)
            far = None if few is None else (few[0].to(wide), few[1].to(wide))
            out = self._attend(query.to(wide), key.to(wide), value.to(wide), far, key_mask)
        return self.out(join_heads(out).to(x.dtype))

    def _compress(
        self, x: Tensor, key: Tensor, value: Tensor, key_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """K̄ and V̄, ``[B, H, r, D]``."""
        scores = self.summary(x)
        with without_autocast(x):
            wide = accumulation_dtype(x.dtype)
            # Finite, so that a sample without real tokens stays finite.
            scores = scores.to(wide).masked_fill(~key_mask.unsqueeze(-1), -1e30)
            # Along memory: GPUs are slow where a softmax strides over all tokens.
            weights = scores.mT.contiguous().softmax(-1).unflatten(1, (self.host.num_heads, -1))
            means = [join_heads(weights @ side.to(wide)) for side in (key, value)]
        norm = self.short_norm
        few = [self._split(norm(side.to(norm.weight.dtype))) for side in means]
        return few[0], few[1]

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        few: tuple[Tensor, Tensor] | None,
        key_mask: Tensor,
    ) -> Tensor:
        tokens = query.shape[-2]
        # Blocks longer than the sequence would be filled up with padding for nothing.
        size = min(self.window, tokens)
        margin = max(size // 2, 1)
        blocks = cut(query / math.sqrt(query.shape[-1]), size)
        windows_k, windows_v = (windows(side, size, margin) for side in (key, value))
        real = windows(key_mask, size, margin, dim=-1)
        near = (blocks @ windows_k).masked_fill(~real[:, None, :, None, :], -1e30)
        if few is None:
            return (near.softmax(-1) @ windows_v.mT).flatten(2, 3)[..., :tokens, :]
        far = (blocks.flatten(2, 3) @ few[0].mT).unflatten(-2, (-1, size))
        weights = torch.cat((far, near), dim=-1).softmax(-1)
        of_far, of_near = weights.split((far.shape[-1], near.shape[-1]), dim=-1)
        out = (of_near @ windows_v.mT).flatten(2, 3) + of_far.flatten(2, 3) @ few[1]
        return out[..., :tokens, :]

    def _split(self, tokens: Tensor) -> Tensor:
        return split_heads(tokens, self.host.num_heads)
