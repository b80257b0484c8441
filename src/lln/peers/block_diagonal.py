"""Block-diagonal softmax attention alone: the short-range half of LLN+Diag."""

import torch
from torch import Tensor

from lln.checks import check_block_size
from lln.functional.dense import block_diagonal_attention
from lln.peers.masked import softmax_matrix
from lln.peers.peer import Card, Core, Host, Mask, visible


class BlockDiagonal(Core):
    """Softmax attention inside consecutive blocks: P_ij = 0 unless ⌊i/b⌋ = ⌊j/b⌋.

    Args:
        block_size: b, tokens in a block; the last block may be short.
    """

    card = Card(
        name="diag",
        title="Block-diagonal attention",
        citation="Qin et al. 2022 (DiagAttention), arXiv 2210.10340; LLN, section 4.2",
        equation="P = softmax(QKᵀ/√d) inside blocks of b tokens, 0 outside",
        complexity="O(N b d)",
        oracle="dense form; softmax where b ≥ N",
    )

    def __init__(self, host: Host, *, block_size: int = 64) -> None:
        super().__init__(host)
        check_block_size(block_size)
        self.block_size = block_size

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask = None) -> Tensor:
        size, is_causal = self.block_size, self.host.is_causal
        return block_diagonal_attention(
            query, key, value, block_size=size, key_mask=key_mask, is_causal=is_causal
        )

    def matrix(self, query: Tensor, key: Tensor, key_mask: Mask = None) -> Tensor:
        return block_matrix(query, key, self.block_size, key_mask, self.host.is_causal)


def block_matrix(
    query: Tensor, key: Tensor, block_size: int, key_mask: Mask, is_causal: bool
) -> Tensor:
    """The dense form ``[B, H, N, N]``; rows that see no key are zero."""
    place = torch.arange(query.shape[-2], device=query.device)
    if key_mask is not None and place.numel():
        # Counted from the first token that is not padding.
        place = place - key_mask[:, None].int().argmax(-1, keepdim=True)
    block = place.div(block_size, rounding_mode="floor")
    allowed = block.unsqueeze(-1) == block.unsqueeze(-2)
    return softmax_matrix(query, key, visible(query, key_mask, is_causal, among=allowed))
