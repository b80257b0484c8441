"""ReLU attention: the paper's linear kernel of Figure 2, and its dense counterpart."""

from torch import Tensor

from lln.precision import accumulation_dtype
from lln_lab.peers.linear import LEAST_FLOOR, WHY_LEAST_FLOOR, LinearCore
from lln_lab.peers.peer import Card, Host, Mask, visible


class Relu(LinearCore):
    """Linear attention with φ(x) = max(0, x), no 1/√d.

    The kernel is positively homogeneous: P(a q, b k) = P(q, k) for all a, b > 0. A row whose
    features meet no key's is zero.

    Args:
        dense: Whether the kernel is max(0, q·k), which has no finite feature map: N² time.
    """

    card = Card(
        name="relu",
        title="ReLU attention",
        citation="Figure 2 of Nahshan et al. 2023, arXiv 2311.13541",
        equation="P_ij ∝ φ(q_i)·φ(k_j), φ(x) = max(0, x); dense=True: P_ij ∝ max(0, q_i·k_j)",
        complexity="O(N d²); O(N² d) with dense=True",
        equivariant=True,
        oracle="dense form; invariance to scale",
        departures=WHY_LEAST_FLOOR,
    )

    floor = LEAST_FLOOR

    def __init__(self, host: Host, *, dense: bool = False) -> None:
        super().__init__(host)
        self.dense = dense

    def feature_map(self, x: Tensor) -> Tensor:
        return x.relu()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask) -> Tensor:
        if self.dense:
            return self.matrix(query, key, key_mask) @ value
        return super().attend(query, key, value, key_mask)

    def matrix(self, query: Tensor, key: Tensor, key_mask: Mask = None) -> Tensor:
        if not self.dense:
            return super().matrix(query, key, key_mask)
        wide = accumulation_dtype(query.dtype)
        weights = (query.to(wide) @ key.to(wide).mT).relu()
        seen = visible(query, key_mask, self.host.is_causal)
        if seen is not None:
            weights = weights.masked_fill(~seen, 0.0)
        return self.normalise(weights, weights.sum(-1, keepdim=True))
