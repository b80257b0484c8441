"""Performer: positive random features of the softmax kernel (FAVOR+).

Dimension legend: B batch, H heads, N tokens, D head width, M features.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from lln.checks import check_count
from lln.checks.names import check_choice
from lln_lab.peers.linear import LinearCore
from lln_lab.peers.option_checks import check_number
from lln_lab.peers.peer import Card, Host, Mask, zero_padding

# Added to the features of the relu kernel, as in the authors' code.
_RELU_OFFSET = 1e-3

# M where nobody says otherwise.
_PUBLISHED_FEATURES = {"skyformer": 128, "opennlplab": 64}
_OPENNLPLAB_FLOOR = 1e-2

# exp of this, summed over any number of keys and multiplied by any value, stays in float32.
_LARGEST_EXPONENT = 60.0


class Performer(LinearCore):
    """Linear attention with φ(x) = M^(−½) (exp(Wx′ − ‖x′‖²/2 − c) + ε), x′ = x d^(−¼).

    W is M×d: blocks of d orthogonal rows of independent χ_d lengths. c keeps exp in range: the
    row's own largest (Wx′)_m for a query, the largest over all real keys for the keys; without ε
    both cancel.

    In a causal layer c of the keys is a constant of W, because a row may not look at later keys:
    Wx′ − ‖x′‖²/2 ≤ ‖w‖²/2 for every x, so that c = max(0, max_m ‖w_m‖²/2 − 60) is enough.

    Args:
        features: M; None = ⌊d ln d⌋.
        kernel: ``"exp"``, or ``"relu"`` for the generalised φ(x) = max(0, Wx′) + 10⁻³.
        epsilon: ε.
        haar: Whether the orthogonal blocks are uniform (signs of QR corrected). False = as QR
            returns them: the mean of W is then not 0 and the kernel biased, as in
            performer-pytorch.
        redraw_every: Training calls between two drawings of W; 0 = never. None = 1000.
        compat: ``"skyformer"`` for the Performer of its LRA tables: x′ = x d^(−½), so that the
            kernel is exp(q·k/d); padded keys stay in the denominator as φ(0); M = 128 and W is
            never redrawn unless told otherwise. ``"opennlplab"`` for the Performer behind the
            paper's Table 1: M = 64, a new W of independent Gaussians for every training call and
            the orthogonal one in evaluation, never redrawn; ε outside M^(−½); denominators of at
            least 0.01.
    """

    card = Card(
        name="performer",
        title="Performer (FAVOR+)",
        citation="Choromanski et al. 2020, arXiv 2009.14794",
        equation="P_ij ∝ φ(q_i)·φ(k_j), φ(x) = M^(−½)(exp(Wx′ − ‖x′‖²/2 − c) + ε), x′ = x d^(−¼)",
        complexity="O(N M d)",
        equivariant=True,
        random="W, at construction and every 1000 training calls",
        oracle="performer-pytorch 1.1.4, sharing W; Monte-Carlo mean of the kernel",
        departures="signs of the orthogonal blocks corrected (haar=False undoes it); the causal "
        "form takes a constant c for the keys; compat='skyformer' computes exp(q·k/d) and leaves "
        "padded keys in the denominator; compat='opennlplab' draws a Gaussian W per training call",
    )

    # ε makes every mass at least ε² times the number of keys.
    floor = 1e-12

    projection: Tensor
    # W of this training call, compat='opennlplab' only.
    gaussian: Tensor

    def __init__(
        self,
        host: Host,
        *,
        features: int | None = None,
        kernel: Literal["exp", "relu"] = "exp",
        epsilon: float = 1e-4,
        haar: bool = True,
        redraw_every: int | None = None,
        compat: Literal["skyformer", "opennlplab"] | None = None,
    ) -> None:
        super().__init__(host)
        check_choice("kernel", kernel, ("exp", "relu"))
        check_choice("compat", compat, (None, *_PUBLISHED_FEATURES))
        check_number("epsilon", epsilon, lambda number: number >= 0, "at least 0")
        width = host.head_dim
        if features is None:
            usual = max(1, int(width * math.log(width)))
            features = _PUBLISHED_FEATURES[compat] if compat else usual
        if redraw_every is None:
            redraw_every = 0 if compat else 1000
        check_count("features", features)
        check_count("redraw_every", redraw_every, least=0)
        self.kernel, self.epsilon, self.haar = kernel, epsilon, haar
        self.redraw_every, self.compat = redraw_every, compat
        self.calls = 0
        self.register_buffer("projection", draw_projection(features, width, haar=haar))
        if compat == "opennlplab":
            self.floor = _OPENNLPLAB_FLOOR
            self.register_buffer("gaussian", torch.randn(features, width), persistent=False)

    def features(self, query: Tensor, key: Tensor, key_mask: Mask) -> tuple[Tensor, Tensor]:
        width = query.shape[-1]
        scale = width**-0.5 if self.compat == "skyformer" else width**-0.25
        weights = (self.gaussian if self._has_own_draw else self.projection).to(query.dtype)
        if self.training:
            # The next call may draw anew in place, before the backward of this one.
            weights = weights.clone()
        query, key = query * scale, key * scale
        along_q, along_k = query @ weights.mT, key @ weights.mT
        if self.kernel == "relu":
            return along_q.relu() + _RELU_OFFSET, along_k.relu() + _RELU_OFFSET
        top_q = along_q.detach().amax(-1, keepdim=True)
        if self.host.is_causal:
            top_k = (weights.square().sum(-1).amax() / 2 - _LARGEST_EXPONENT).clamp_min(0.0)
        else:
            if key_mask is not None:
                along_k = along_k.masked_fill(~key_mask[:, None, :, None], -torch.inf)
            top_k = along_k.detach().amax((-2, -1), keepdim=True)
            top_k = top_k.masked_fill(top_k == -torch.inf, 0.0)
        ratio = weights.shape[0] ** -0.5
        half_q, half_k = (x.square().sum(-1, keepdim=True) / 2 for x in (query, key))
        offset = self.epsilon if self.compat == "opennlplab" else ratio * self.epsilon
        return (
            ratio * (along_q - half_q - top_q).exp() + offset,
            ratio * (along_k - half_k - top_k).exp() + offset,
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask = None) -> Tensor:
        if self._has_own_draw or (self.training and self.redraw_every):
            self._count_call()
        if self.compat == "skyformer":
            value = zero_padding(value, key_mask)
        return super().forward(query, key, value, key_mask)

    def _masked(self, query: Tensor, key: Tensor, key_mask: Mask) -> tuple[Tensor, Tensor]:
        if self.compat == "skyformer":
            # Zeroed and left in, as its code has it: φ(0) of padding weighs on the denominator.
            return self.features(query, zero_padding(key, key_mask), None)
        return super()._masked(query, key, key_mask)

    @property
    def _has_own_draw(self) -> bool:
        return self.compat == "opennlplab" and self.training

    @torch.no_grad()
    def redraw(self) -> None:
        """Draw W anew from torch's default generator."""
        features, width = self.projection.shape
        self.projection.copy_(draw_projection(features, width, haar=self.haar))
        self.calls = 0

    @torch.compiler.disable()
    def _count_call(self) -> None:
        # A checkpointed forward runs again inside the backward and must find the same W.
        if torch._C._current_graph_task_id() != -1:
            return
        if self._has_own_draw:
            self.gaussian.normal_()
        if self.redraw_every and self.calls >= self.redraw_every:
            self.redraw()
        self.calls += 1

    def get_extra_state(self) -> Tensor:
        """Training calls since W was drawn: a resumed run keeps the schedule."""
        return torch.tensor(self.calls)

    def set_extra_state(self, state: Tensor) -> None:
        """Take up what `get_extra_state` returned."""
        self.calls = int(state)


def draw_projection(features: int, width: int, *, haar: bool = True) -> Tensor:
    """W ``[M, D]``: orthogonal blocks of D rows, each row as long as a Gaussian vector.

    Args:
        features: M.
        width: D.
        haar: Whether the signs of R's diagonal go into Q, which makes Q uniform over rotations.
    """
    blocks = -(-features // width)
    orthogonal, triangle = torch.linalg.qr(torch.randn(blocks, width, width))
    if haar:
        orthogonal = orthogonal * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    lengths = torch.randn(features, width).norm(dim=1, keepdim=True)
    return lengths * orthogonal.mT.flatten(0, 1)[:features]
