"""TransNormer T1 and T2: local attention in the lower layers, normed linear attention above.

Dimension legend: B batch, H heads, N tokens, D head width, C tokens of a chunk.
"""

import dataclasses
from abc import abstractmethod
from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from lln.checks import check_count
from lln.checks.names import check_choice
from lln.precision import accumulation_dtype, without_autocast
from lln_lab.peers.gated import GatedLinearUnit, srms
from lln_lab.peers.linear import causal_sums, full_sums
from lln_lab.peers.masked import attend
from lln_lab.peers.peer import Card, Host, Mask, Peer, real_tokens, visible, zero_padding
from lln_lab.peers.projections import join_heads, split_heads, square_maps
from lln_lab.peers.rotary import LearnedRotation
from lln_lab.peers.token_blocks import cut


class TransNormer(Peer):
    """x ← SRMS(x + attention(x)), x ← SRMS(x + GLU(x)).

    The first half of the host's layers has DiagAttention, in chunks of C tokens, the second half
    NormAttention, O = SRMS(φ(Q)(φ(K)ᵀV)): no denominator, the norm runs over all heads. Positions
    are LRPE (`LearnedRotation`): after φ in NormAttention, within the chunk in DiagAttention.

    Args:
        host: Sizes and place; `layer` and `layers` choose the attention.
        chunk: C.
        lrpe: Whether there are positions inside the attention.
        compat: ``"released"``, as in the released code: the gate of the GLU has no activation,
            because the code does not find the one asked for; padding is not masked; and the zeros
            that fill up the last chunk are keys like others, which T2's softmax counts.
    """

    # Whether DiagAttention is a softmax, and not a ReLU with a norm behind it.
    has_local_softmax: ClassVar[bool]

    def __init__(
        self,
        host: Host,
        *,
        chunk: int = 64,
        lrpe: bool = True,
        compat: Literal["released"] | None = None,
    ) -> None:
        super().__init__(host)
        check_count("chunk", chunk)
        check_choice("compat", compat, (None, "released"))
        width = host.embed_dim
        self.chunk, self.is_local, self.compat = chunk, host.layer < host.layers // 2, compat
        self.query, self.key, self.value, self.out = square_maps(width, 4)
        self.positions = LearnedRotation(host.head_dim) if lrpe else None
        activation = F.silu if compat is None else _nothing
        self.glu = GatedLinearUnit(width, int(8 * width / 3), activation)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    @staticmethod
    @abstractmethod
    def features(x: Tensor) -> Tensor:
        """φ of NormAttention."""

    def mix(self, x: Tensor, key_mask: Mask) -> Tensor:
        x = srms(x + self.attend(x, key_mask))
        return srms(x + self.glu(x))

    def attend(self, x: Tensor, key_mask: Mask) -> Tensor:
        """The attention of this layer with its projections, ``[B, N, H·D]`` → the same."""
        if self.compat == "released":
            key_mask = None
        # Without a denominator, a key without a value is no key.
        sides = self.query(x), self.key(x), zero_padding(self.value(x), key_mask)
        query, key, value = (split_heads(side, self.host.num_heads) for side in sides)
        attention = self._local if self.is_local else self._linear
        with without_autocast(x):
            out = join_heads(attention(query, key, value, key_mask))
            if not (self.is_local and self.has_local_softmax):
                out = srms(out)
        return self.out(out.to(value.dtype))

    def _linear(self, query: Tensor, key: Tensor, value: Tensor, _: Mask) -> Tensor:
        """φ(Q)(φ(K)ᵀV), ``[B, H, N, D]`` each, in the accumulation dtype: sums grow with N."""
        wide = accumulation_dtype(value.dtype)
        features_q, features_k = (
            self._place(self.features(side.to(wide))) for side in (query, key)
        )
        sums = causal_sums if self.host.is_causal else full_sums
        return sums(features_q, features_k, value.to(wide))

    def _local(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask) -> Tensor:
        """Attention inside chunks, ``[B, H, N, D]`` each."""
        batch, _, tokens, _ = value.shape
        chunk = self.chunk if self.compat == "released" else min(self.chunk, tokens)
        real = None
        if key_mask is not None or (self.compat is None and tokens % chunk):
            real = cut(real_tokens(value, key_mask), chunk, dim=1).flatten(0, 1)
        # The chunks are a batch of short sequences, [B·N/C, H, C, D].
        query, key, value = (
            cut(side, chunk).transpose(1, 2).flatten(0, 1) for side in (query, key, value)
        )
        query, key = self._place(query), self._place(key)
        if self.has_local_softmax:
            allowed = visible(value, real, self.host.is_causal)
            out = attend(query.to(value.dtype), key.to(value.dtype), value, allowed)
        else:
            wide = accumulation_dtype(value.dtype)
            scores = query.to(wide) @ key.to(wide).mT * self.host.head_dim**-0.5
            weights = scores.tril().relu() if self.host.is_causal else scores.relu()
            out = weights @ value.to(wide)
        out = out.unflatten(0, (batch, -(-tokens // chunk))).transpose(1, 2)
        return out.flatten(2, 3)[:, :, :tokens]

    def _place(self, x: Tensor) -> Tensor:
        return x if self.positions is None else self.positions(x)


class TransNormerT1(TransNormer):
    """φ = elu; DiagAttention is SRMS(relu(QKᵀ/√d) V)."""

    has_local_softmax = False

    card = Card(
        name="transnormer_t1",
        title="TransNormer T1",
        kind="block",
        citation="Qin et al. 2022, arXiv 2210.10340",
        equation="lower half of the layers: SRMS(relu(QKᵀ/√d) V) in chunks; upper half: "
        "SRMS(φ(Q)(φ(K)ᵀV)), φ = elu; LRPE; then a GLU",
        complexity="O(N d² + N C d)",
        row_stochastic=False,
        period=2,
        random="the reflection of LRPE, once",
        adds="replaces the layer: q, k, v, out; a GLU of width 8/3; d/2 angles",
        oracle="dense form; its invariances",
        departures="The GLU's gate is SiLU as in the paper, padding is masked and nothing but "
        "tokens is attended to; compat='released' undoes all three: give no key_mask to reproduce "
        "it, because padded tokens of a key_mask are zeroed before every layer",
    )

    @staticmethod
    def features(x: Tensor) -> Tensor:
        return F.elu(x)


class TransNormerT2(TransNormer):
    """φ = 1 + elu; DiagAttention is softmax(QKᵀ/√d) V."""

    has_local_softmax = True

    card = dataclasses.replace(
        TransNormerT1.card,
        name="transnormer_t2",
        title="TransNormer T2",
        repeats_on_gpu=False,
        equation="lower half of the layers: softmax(QKᵀ/√d) V in chunks; upper half: "
        "SRMS(φ(Q)(φ(K)ᵀV)), φ = 1 + elu; LRPE; then a GLU",
    )

    @staticmethod
    def features(x: Tensor) -> Tensor:
        return 1 + F.elu(x)


def _nothing(x: Tensor) -> Tensor:
    return x
