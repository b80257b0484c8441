"""BigBird: blocks that see their neighbours, the two ends and a few blocks drawn at random.

Dimension legend: B batch, H heads, N tokens, D head width, b tokens of a block, n blocks,
r random blocks, S = 5 + r blocks that a block may look at.
"""

import torch
from torch import Tensor

from lln.checks import check_count
from lln.eager.whole_division import divided
from lln_lab.peers.masked import attend, softmax_matrix
from lln_lab.peers.peer import Card, Core, Host, Mask, real_tokens, visible
from lln_lab.peers.token_blocks import cut, with_neighbours


class BigBird(Core):
    """Block-sparse softmax attention.

        P_ij ∝ exp(q_i·k_j/√d) where block(j) is the first, the last, block(i) or next to it, or
        one of r others drawn for block(i); every j where block(i) is the first or the last.

    The last block is the one with the last real token of the sample, and random blocks are drawn
    among those before it, so that padding changes nothing. The draw is a table of numbers, turned
    into blocks at every length; blocks beyond ``max_len`` use the table from its start again.

    Args:
        host: Its ``max_len`` says for how many blocks to draw.
        block: b.
        random_blocks: r.
        seed: Of the draw, to which the layer's index is added; None = torch's default generator.
    """

    draws: Tensor

    card = Card(
        name="bigbird",
        title="BigBird",
        citation="Zaheer et al. 2020, arXiv 2007.14062",
        equation="P = softmax(QKᵀ/√d) over first, last, neighbouring and random blocks",
        complexity="O(N b (5 + r) d)",
        causal=False,
        repeats_on_gpu=False,
        random="r blocks for each head and block, once, when built",
        oracle="transformers BigBirdBlockSparseAttention, sharing its random blocks; dense form",
        departures="random blocks are the same in training and evaluation (transformers looks at "
        "the first block r times more in evaluation); the last block is the last real one; short "
        "inputs stay sparse as far as blocks are left out (transformers turns to full attention "
        "at 5 + 2r blocks)",
    )

    def __init__(
        self, host: Host, *, block: int = 64, random_blocks: int = 3, seed: int | None = None
    ) -> None:
        super().__init__(host)
        check_count("block", block)
        check_count("random_blocks", random_blocks, least=0)
        self.block, self.random_blocks = block, random_blocks
        generator = None
        if seed is not None:
            check_count("seed", seed, least=0)
            generator = torch.Generator().manual_seed(seed + host.layer)
        shape = (host.num_heads, -(-host.max_len // block), random_blocks)
        # Whole numbers, which no conversion to half precision rounds.
        self.register_buffer("draws", torch.randint(2**31, shape, generator=generator))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask = None) -> Tensor:
        last = self.last_block(query, key_mask)
        chosen, valid = self.plan(last, -(-query.shape[-2] // self.block))
        return attend_blocks(query, key, value, key_mask, last, chosen, valid, block=self.block)

    def matrix(self, query: Tensor, key: Tensor, key_mask: Mask = None) -> Tensor:
        tokens = query.shape[-2]
        last = self.last_block(query, key_mask)
        blocks = -(-tokens // self.block)
        chosen, valid = self.plan(last, blocks)
        own = torch.arange(blocks, device=query.device)
        is_end = (own == 0) | (own == last.unsqueeze(-1))
        seen = is_end[:, None, :, None] | is_end[:, None, None, :]
        seen = seen | ((own.unsqueeze(-1) - own).abs() <= 1)
        for one, is_one in zip(chosen.unbind(-1), valid.unbind(-1), strict=True):
            seen = seen | ((one.unsqueeze(-1) == own) & is_one.unsqueeze(-1))
        of_token = divided(torch.arange(tokens, device=query.device), self.block)
        seen = seen[..., of_token, :][..., of_token]
        return softmax_matrix(query, key, visible(query, key_mask, among=seen))

    def last_block(self, query: Tensor, key_mask: Mask) -> Tensor:
        """The block of each sample's last real token, int64 ``[B]``."""
        batch, _, tokens, _ = query.shape
        if key_mask is None:
            return torch.full((batch,), (tokens - 1) // self.block, device=query.device)
        place = torch.arange(tokens, device=query.device)
        return (key_mask * place).amax(-1) // self.block

    def plan(self, last: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """The random blocks.

        Args:
            last: ``[B]``, see `last_block`.
            blocks: n.

        Returns:
            int64 and bool ``[B, H, n, r]``: the blocks, and which of them count: where fewer than
            r were left to draw, the others do not.
        """
        own = torch.arange(blocks, device=last.device)
        # Blocks that nothing else makes visible: 1 … own − 2 and own + 2 … last − 1.
        before = (torch.minimum(own, last.unsqueeze(-1)) - 2).clamp_min(0)
        after = (last.unsqueeze(-1) - own - 2).clamp_min(0)
        left = (before + after).unsqueeze(1)
        draws = self.draws[:, own % self.draws.shape[1]]
        ranks = left.new_zeros(*torch.broadcast_shapes(left.shape, draws.shape[:2]), 0)
        for step in range(self.random_blocks):
            rank = draws[..., step] % (left - step).clamp_min(1)
            # Counted among those not drawn yet: step over each drawn one, the lowest first.
            for drawn in ranks.sort(-1).values.unbind(-1):
                rank = rank + (rank >= drawn)
            ranks = torch.cat((ranks, rank.unsqueeze(-1)), dim=-1)
        before = before[:, None, :, None]
        chosen = torch.where(ranks < before, ranks + 1, ranks - before + own.unsqueeze(-1) + 2)
        valid = torch.arange(self.random_blocks, device=last.device) < left.unsqueeze(-1)
        return chosen.clamp(0, blocks - 1), valid.expand_as(chosen)


def attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Mask,
    last: Tensor,
    chosen: Tensor,
    valid: Tensor,
    *,
    block: int,
) -> Tensor:
    """Attend without the N×N matrix: the keys of S blocks are gathered for every block.

    Args:
        query: ``[B, H, N, D]``.
        key: Like query.
        value: Like query.
        key_mask: bool ``[B, N]``, True = a real token.
        last: int64 ``[B]``, the global block at the end.
        chosen: int64 ``[B, H, n, r]``, random blocks; none of them visible otherwise.
        valid: bool ``[B, H, n, r]``, which of them count.
        block: b.

    Returns:
        ``[B, H, N, D]``; zeros where a query sees nothing.
    """
    heads, tokens = query.shape[1:3]
    key_mask = real_tokens(query, key_mask)
    real = cut(key_mask, block, dim=-1)
    blocks_q, blocks_k, blocks_v = (cut(side, block) for side in (query, key, value))
    at_end = last[:, None, None, None, None]

    def spread(side: Tensor) -> Tensor:
        """What every block looks at: ``[B, H, n, b, D]`` → ``[B, H, n, S·b, D]``."""
        # The ends are spread, not fetched: their gradients, one from every block, are then summed
        # in float32 and in order, where a GPU's gather would add them up in half precision.
        ends = side[:, :, :1], torch.take_along_dim(side, at_end, dim=2)
        index = chosen.flatten(2)[..., None, None]
        picked = torch.take_along_dim(side, index, dim=2).unflatten(2, chosen.shape[2:])
        spread_ends = [end.expand_as(side) for end in ends]
        return torch.cat((*spread_ends, with_neighbours(side), picked.flatten(3, 4)), dim=3)

    is_real = real[:, None, :, :, None].expand(-1, heads, -1, -1, -1)
    counts = torch.cat((_counted(last, blocks_k.shape[2], heads), valid), dim=-1)
    seen = spread(is_real).mT & counts.repeat_interleave(block, dim=-1).unsqueeze(-2)
    sides = (blocks_q, spread(blocks_k), spread(blocks_v), seen)
    out = attend(*(side.flatten(1, 2) for side in sides)).unflatten(1, (heads, -1))
    # The two ends see all.
    ends = torch.cat((blocks_q[:, :, :1], torch.take_along_dim(blocks_q, at_end, dim=2)), dim=2)
    rows = attend(ends.flatten(2, 3), key, value, visible(key, key_mask))
    of_first, of_last = rows.unflatten(2, (2, 1, block)).unbind(2)
    own = torch.arange(out.shape[2], device=query.device)[:, None, None]
    out = torch.where(own == at_end, of_last, torch.where(own == 0, of_first, out))
    return out.flatten(2, 3)[..., :tokens, :]


def _counted(last: Tensor, blocks: int, heads: int) -> Tensor:
    """Which of first, last, previous, own and next block count, each once: ``[B, H, n, 5]``."""
    own, last = torch.arange(blocks, device=last.device), last.unsqueeze(-1)
    counted = (own >= 0, last > 0, (own > 1) & (own <= last), (own > 0) & (own < last))
    counted = torch.broadcast_tensors(*counted, own + 1 < last)
    return torch.stack(counted, dim=-1).unsqueeze(1).expand(-1, heads, -1, -1)
