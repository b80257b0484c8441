"""Softmax attention: the baseline every system is compared with."""

from torch import Tensor
from torch.nn import functional as F

from lln_lab.peers.masked import attend, softmax_matrix
from lln_lab.peers.peer import Card, Core, Mask, visible


class Softmax(Core):
    """O = softmax(QKᵀ/√d) V, Eq. (1), through torch's fused kernels."""

    card = Card(
        name="softmax",
        title="Softmax attention",
        citation="Vaswani et al. 2017, arXiv 1706.03762",
        equation="P = softmax(QKᵀ/√d)",
        complexity="O(N² d)",
        is_linear=False,
        equivariant=True,
        repeats_on_gpu=False,
        oracle="torch scaled_dot_product_attention; dense form",
    )

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask = None) -> Tensor:
        if key_mask is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=self.host.is_causal)
        return attend(query, key, value, visible(query, key_mask, self.host.is_causal))

    def matrix(self, query: Tensor, key: Tensor, key_mask: Mask = None) -> Tensor:
        return softmax_matrix(query, key, visible(query, key_mask, self.host.is_causal))
