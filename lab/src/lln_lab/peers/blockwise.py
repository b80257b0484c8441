"""Blockwise attention (BlockBERT): every head pairs the blocks of queries with blocks of keys.

Dimension legend: B batch, H heads, N tokens, D head width, n blocks, S tokens of the longest block.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lln.checks import check_count
from lln.errors import InvalidInputError
from lln_lab.peers.masked import attend, softmax_matrix
from lln_lab.peers.peer import Card, Core, Host, Mask, real_tokens
from lln_lab.peers.token_blocks import pick, real_first


class Blockwise(Core):
    """Query block a of head h attends key block π_h(a) = (a + shift_h) mod n, and nothing else.

    The real tokens of a sample are cut into n consecutive blocks whose lengths differ by at most
    one, so that padding moves no border; a sample of fewer than n tokens has one block per token.

    Args:
        blocks: n.
        shifts: One number per head, 0 … n − 1; None = the paper's ratio: one head in six (at least
            one) for each shift that is not 0, as far as they go, the others 0. That is 10 : 2 for
            12 heads and n = 2, 8 : 2 : 2 for n = 3.
    """

    shift: Tensor

    card = Card(
        name="blockwise",
        title="Blockwise attention (BlockBERT)",
        citation="Qiu et al. 2019, arXiv 1911.02972",
        equation="O_a = softmax(Q_a K_πᵀ/√d) V_π, π = π_h(a), for blocks a of N/n tokens",
        complexity="O(N² d / n)",
        is_linear=False,
        causal=False,
        repeats_on_gpu=False,
        oracle="dense mask form",
        departures="Blocks are cut from the real tokens of each sample, not from the padded "
        "length, and need not be equally long.",
    )

    def __init__(self, host: Host, *, blocks: int = 2, shifts: Sequence[int] | None = None) -> None:
        super().__init__(host)
        check_count("blocks", blocks)
        self.blocks = blocks
        if shifts is None:
            shifts = _usual_shifts(host.num_heads, blocks)
        self.shifts = tuple(shifts) if isinstance(shifts, Sequence) else ()
        if len(self.shifts) != host.num_heads or any(
            shift not in range(blocks) for shift in self.shifts
        ):
            raise InvalidInputError(
                f"shifts must hold {host.num_heads} whole numbers from 0 to {blocks - 1}, one "
                f"per head, got {shifts!r}."
            )
        self.register_buffer("shift", torch.tensor(self.shifts)[:, None], persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask = None) -> Tensor:
        heads, tokens = query.shape[1:3]
        if key_mask is None and tokens % self.blocks == 0:
            return self._attend_equal(query, key, value)
        real = real_tokens(query, key_mask)
        starts, lengths = self._cuts(real)
        offset = torch.arange(-(-tokens // self.blocks), device=query.device)
        inside = offset < lengths.unsqueeze(-1)
        rank = torch.where(inside, starts.unsqueeze(-1) + offset, 0)
        source = real_first(real).gather(-1, rank.flatten(1)).unsqueeze(1)
        partner = self._partners(lengths)

        def cut(side: Tensor) -> Tensor:
            return pick(side, source).unflatten(2, (self.blocks, -1))

        def turn(side: Tensor) -> Tensor:
            index = partner[..., None, None].expand_as(side)
            return side.gather(2, index).flatten(0, 1)

        seen = inside.unsqueeze(1).expand(-1, heads, -1, -1)
        seen = seen.gather(2, partner.unsqueeze(-1).expand_as(seen)).flatten(0, 1)
        out = attend(cut(query).flatten(0, 1), turn(cut(key)), turn(cut(value)), seen.unsqueeze(-2))
        # Back to its place: rank among the real tokens → block and offset.
        place = (real.cumsum(-1) - 1).clamp_min(0)
        # The last block that starts at or before it, empty ones left out.
        block = torch.searchsorted(starts.contiguous(), place.contiguous(), right=True) - 1
        block = block.clamp_min(0)
        slot = block * len(offset) + place - starts.gather(-1, block)
        slot = slot.clamp(0, self.blocks * len(offset) - 1)
        return pick(out.unflatten(0, (-1, heads)).flatten(2, 3), slot.unsqueeze(1))

    def matrix(self, query: Tensor, key: Tensor, key_mask: Mask = None) -> Tensor:
        real = real_tokens(query, key_mask)
        count = real.sum(-1, keepdim=True)
        used = count.clamp(1, self.blocks)
        place = real.cumsum(-1) - 1
        # The block that holds place r starts at or before it: the inverse of ⌊a · count / n⌋.
        block = ((place + 1) * used - 1).clamp_min(0) // count.clamp_min(1)
        partner = (block.unsqueeze(1) + self.shift) % used.unsqueeze(1)
        allowed = partner.unsqueeze(-1) == block[:, None, None, :]
        return softmax_matrix(query, key, allowed & real[:, None, None, :])

    def _attend_equal(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Blocks of one length without padding: no mask, which the fastest kernels do not take."""
        block = torch.arange(self.blocks, device=query.device)
        index = ((block + self.shift) % self.blocks)[None, :, :, None, None]
        blocks_q, blocks_k, blocks_v = (
            side.unflatten(2, (self.blocks, -1)) for side in (query, key, value)
        )
        keys, values = (torch.take_along_dim(side, index, dim=2) for side in (blocks_k, blocks_v))
        out = attend(blocks_q.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1), None)
        return out.unflatten(0, query.shape[:2]).flatten(2, 3)

    def _cuts(self, real: Tensor) -> tuple[Tensor, Tensor]:
        """First rank and length ``[B, n]`` of every block; blocks past the used ones are empty."""
        count = real.sum(-1, keepdim=True)
        used = count.clamp(1, self.blocks)
        border = torch.arange(self.blocks + 1, device=real.device).minimum(used)
        starts = border * count // used
        return starts[:, :-1], starts.diff(dim=-1)

    def _partners(self, lengths: Tensor) -> Tensor:
        """The key block ``[B, H, n]`` of every query block."""
        used = (lengths > 0).sum(-1).clamp_min(1)[:, None, None]
        return (torch.arange(self.blocks, device=lengths.device) + self.shift) % used


def _usual_shifts(heads: int, blocks: int) -> tuple[int, ...]:
    each = max(1, heads // 6)
    turned = [shift for shift in range(1, blocks) for _ in range(each)][: heads - 1]
    return (0,) * (heads - len(turned)) + tuple(turned)
