"""Sparse Sinkhorn attention: blocks of keys are sorted, softly, to the blocks of queries.

Dimension legend: B batch, H heads, N tokens, D head width, b tokens of a block, G blocks.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lln.precision import accumulation_dtype, without_autocast
from lln_lab.peers.masked import attend
from lln_lab.peers.option_checks import check_counts, check_number
from lln_lab.peers.peer import Card, Host, Mask, Peer, real_tokens
from lln_lab.peers.projections import square_maps
from lln_lab.peers.token_blocks import cut

# A logarithm of zero that survives subtraction and has a gradient.
LOG_ZERO = -1e9


class Sinkhorn(Peer):
    """Every block attends its own tokens and a mixture of blocks that a sorting network chose.

        sorting network:  ψ_g = Σ x_i over block g,  R_gh = (W_B relu(W_P ψ_g))_h
        rows, then columns made to sum to 1:  S⁰ = exp((R + ε) / τ),  Sᵗ = F_c(F_r(Sᵗ⁻¹))
        K̃_g = Σ_h S_gh K_h,  Ṽ_g = Σ_h S_gh V_h,  O_g = softmax(Q_g [K_g; K̃_g]ᵀ/√d) [V_g; Ṽ_g]

    ε is Gumbel noise in training and 0 in eval mode. Blocks without a real token take no part in
    the sorting. Padded tokens add nothing to a mixture; a place of the mixture that no block fills
    with a real token is hidden.

    Args:
        block_size: b.
        temperature: τ.
        iterations: t.
    """

    card = Card(
        name="sinkhorn",
        title="Sparse Sinkhorn attention",
        kind="mixer",
        citation="Tay et al. 2020, arXiv 2002.11296",
        equation="O_g = softmax(Q_g [K_g; (SK)_g]ᵀ/√d) [V_g; (SV)_g], S = Sinkhorn(R(Σ x)/τ)",
        complexity="O(N b d + N² d / b); memory O(N b + (N/b)²)",
        is_linear=False,
        causal=False,
        row_stochastic=False,
        repeats_on_gpu=False,
        needs_max_len=True,
        random="Gumbel noise on the sorting logits, in training only",
        adds="query, key, value and output projections; a sorting network of D² + D·H·⌈max_len/b⌉",
        departures="Logits go to the exponential as they are (the sinkhorn-transformer package "
        "takes the logarithm of their positive part); one network sorts for all heads, a row of "
        "logits per head. The causal form and SortCut are not built.",
    )

    def __init__(
        self, host: Host, *, block_size: int = 64, temperature: float = 0.75, iterations: int = 7
    ) -> None:
        super().__init__(host)
        check_counts(block_size=block_size, iterations=iterations)
        check_number("temperature", temperature, lambda number: number > 0, "positive")
        self.block_size, self.temperature, self.iterations = block_size, temperature, iterations
        self.query, self.key, self.value, self.out = square_maps(host.embed_dim, 4)
        blocks = -(-host.max_len // block_size)
        self.sort_hidden = nn.Linear(host.embed_dim, host.embed_dim)
        self.sort_out = nn.Linear(host.embed_dim, host.num_heads * blocks)

    def mix(self, x: Tensor, key_mask: Mask) -> Tensor:
        length, heads = x.shape[1], self.host.num_heads
        is_full = key_mask is None and length % self.block_size == 0
        real = cut(real_tokens(x, key_mask), self.block_size, dim=1)
        blocks = cut(x, self.block_size)
        query, key, value = (
            project(blocks).unflatten(-1, (heads, -1)).permute(0, 3, 1, 2, 4)
            for project in (self.query, self.key, self.value)
        )
        order = self.sorting(blocks, real.any(-1))
        with without_autocast(x):
            keep = real[:, None, :, :, None]
            key, value = (
                torch.cat((side, _mixed(order, torch.where(keep, side, 0.0))), dim=-2)
                for side in (key, value)
            )
        seen = None
        if not is_full:
            # At which offsets a mixture holds anything.
            filled = real.any(1, keepdim=True).expand_as(real)
            seen = torch.cat((real, filled), dim=-1)[:, None, :, None, :]
            seen = seen.expand(-1, heads, -1, -1, -1).flatten(0, 1)
        query, key, value = (side.flatten(0, 1) for side in (query, key, value))
        out = attend(query, key, value, seen)
        out = out.unflatten(0, (-1, heads)).permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2)
        return self.out(out[:, :length])

    def sorting(self, blocks: Tensor, is_used: Tensor) -> Tensor:
        """S ``[B, H, G, G]`` in the accumulation dtype; rows of unused blocks are zeros.

        Args:
            blocks: ``[B, G, b, embed_dim]``, padded tokens zero.
            is_used: bool ``[B, G]``, which blocks hold a real token.
        """
        count, heads = blocks.shape[1], self.host.num_heads
        wide = accumulation_dtype(blocks.dtype)
        sums = blocks.sum(2, dtype=wide).to(blocks.dtype)
        logits = self.sort_out(F.relu(self.sort_hidden(sums))).unflatten(-1, (heads, -1))
        logits = logits[..., :count].transpose(1, 2).to(wide)
        if self.training:
            # The logarithm of an exponential variate, turned over, is Gumbel.
            logits = logits - torch.empty_like(logits).exponential_().log()
        unused = ~(is_used[:, None, :, None] & is_used[:, None, None, :])
        log_order = (logits / self.temperature).masked_fill(unused, LOG_ZERO)
        for _ in range(self.iterations):
            for axis in (-1, -2):
                log_order = log_order - log_order.logsumexp(axis, keepdim=True)
                log_order = log_order.masked_fill(unused, LOG_ZERO)
        return log_order.exp()


def _mixed(order: Tensor, blocks: Tensor) -> Tensor:
    """Σ_h S_gh X_h: ``[B, H, G, G]`` and ``[B, H, G, b, D]``, in the dtype of blocks."""
    mixed = order @ blocks.to(order.dtype).flatten(-2)
    return mixed.unflatten(-1, blocks.shape[-2:]).to(blocks.dtype)
