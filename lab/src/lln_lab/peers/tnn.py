"""TNN, the Toeplitz neural network: mixing by relative position alone.

Dimension legend: B batch, N tokens, W width of the tokens.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from lln.checks import check_count
from lln_lab.peers.gated import GatedLinearUnit, srms
from lln_lab.peers.option_checks import check_counts, check_number
from lln_lab.peers.peer import Card, Host, Mask, Peer, zero_padding
from lln_lab.peers.toeplitz import Toeplitz


class ToeplitzNetwork(Peer):
    """x ← SRMS(x + GTU(x)), x ← SRMS(x + GLU(x)).

    GTU(x) = W_o[silu(W_u x) ⊙ T silu(W_v x)] with T a Toeplitz matrix of every channel
    (`Toeplitz`). There are no heads.

    Args:
        expansion: Width of u and v over that of the tokens.
        gamma: Decay of the entries of T with the distance.
        rpe_width: Of the network that makes the entries.
        rpe_layers: Of the network that makes the entries.
    """

    card = Card(
        name="tnn",
        title="TNN (Toeplitz neural network)",
        kind="block",
        citation="Qin et al. 2023, arXiv 2305.04749",
        equation="x = SRMS(x + W_o[silu(W_u x) ⊙ T silu(W_v x)]), T_ij = γ^|i−j| RPE(i−j); "
        "then a GLU",
        complexity="O(N log N · 3W)",
        row_stochastic=False,
        adds="replaces the layer: u, v, out of width 3; a GLU of width 1; the RPE network",
        oracle="dense Toeplitz form",
        departures="Padded tokens are zeroed before T; the FFT runs in float32 at least.",
    )

    def __init__(
        self,
        host: Host,
        *,
        expansion: int = 3,
        gamma: float = 0.99,
        rpe_width: int = 64,
        rpe_layers: int = 6,
    ) -> None:
        super().__init__(host)
        check_counts(expansion=expansion, rpe_width=rpe_width)
        check_count("rpe_layers", rpe_layers, least=0)
        check_number("gamma", gamma, lambda number: 0 < number <= 1, "above 0 and at most 1")
        width, inner = host.embed_dim, expansion * host.embed_dim
        self.gate, self.value = nn.Linear(width, inner), nn.Linear(width, inner)
        self.toeplitz = Toeplitz(
            inner, gamma=gamma, is_causal=host.is_causal, width=rpe_width, layers=rpe_layers
        )
        self.out = nn.Linear(inner, width)
        self.glu = GatedLinearUnit(width, width)

    def mix(self, x: Tensor, key_mask: Mask) -> Tensor:
        x = srms(x + self.gated_toeplitz(x, key_mask))
        return srms(x + self.glu(x))

    def gated_toeplitz(self, x: Tensor, key_mask: Mask) -> Tensor:
        """GTU(x)."""
        value = zero_padding(F.silu(self.value(x)), key_mask)
        return self.out(F.silu(self.gate(x)) * self.toeplitz(value).to(value.dtype))
