"""Block-diagonal softmax attention alone: the short-range half of LLN+Diag."""

import torch
from torch import Tensor

from lln.checks import check_block_size, check_count
from lln.errors import InvalidInputError
from lln.functional.dense import block_diagonal_attention
from lln_lab.peers.masked import softmax_matrix
from lln_lab.peers.peer import Card, Core, Host, Mask, visible


class BlockDiagonal(Core):
    """Softmax attention inside consecutive blocks: P_ij = 0 unless ⌊i/b⌋ = ⌊j/b⌋.

    Args:
        block_size: b, tokens in a block; the last block may be short.
        shift: Tokens in a first block that is shorter, 0 = none: where it is b/2 in every other
            layer, what a token sees grows from layer to layer. Only for texts without padding.
    """

    card = Card(
        name="diag",
        title="Block-diagonal attention",
        citation="Qin et al. 2022 (DiagAttention), arXiv 2210.10340; LLN, section 4.2",
        equation="P = softmax(QKᵀ/√d) inside blocks of b tokens, 0 outside",
        complexity="O(N b d)",
        oracle="dense form; softmax where b ≥ N",
    )

    def __init__(self, host: Host, *, block_size: int = 64, shift: int = 0) -> None:
        super().__init__(host)
        check_block_size(block_size)
        check_count("shift", shift, 0)
        if shift >= block_size:
            raise InvalidInputError(f"shift must be below block_size={block_size}, got {shift}.")
        self.block_size, self.shift = block_size, shift

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask = None) -> Tensor:
        self._check_padding(key_mask)
        cut, sides = self.shift, (query, key, value)
        if cut == 0:
            return self._attend(*sides, key_mask)
        first, rest = [side[:, :, :cut] for side in sides], [side[:, :, cut:] for side in sides]
        return torch.cat([self._attend(*first), self._attend(*rest)], 2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask = None) -> Tensor:
        size, is_causal = self.block_size, self.host.is_causal
        return block_diagonal_attention(
            query, key, value, block_size=size, key_mask=key_mask, is_causal=is_causal
        )

    def matrix(self, query: Tensor, key: Tensor, key_mask: Mask = None) -> Tensor:
        self._check_padding(key_mask)
        sides = (query, key, self.block_size, key_mask, self.host.is_causal)
        return block_matrix(*sides, self.shift)

    def _check_padding(self, key_mask: Mask) -> None:
        if self.shift and key_mask is not None:
            raise InvalidInputError(
                f"shift={self.shift} takes no key_mask, because blocks are counted from the first "
                "real token; send texts without padding, or use shift=0."
            )


def block_matrix(
    query: Tensor, key: Tensor, block_size: int, key_mask: Mask, is_causal: bool, shift: int = 0
) -> Tensor:
    """The dense form ``[B, H, N, N]``; rows that see no key are zero."""
    place = torch.arange(query.shape[-2], device=query.device) - shift
    if key_mask is not None and place.numel():
        # Counted from the first token that is not padding.
        place = place - key_mask[:, None].int().argmax(-1, keepdim=True)
    block = place.div(block_size, rounding_mode="floor")
    allowed = block.unsqueeze(-1) == block.unsqueeze(-2)
    return softmax_matrix(query, key, visible(query, key_mask, is_causal, among=allowed))
