"""FLASH: gated attention units with mixed chunk attention.

Dimension legend: B batch, N tokens, W width of the tokens, C tokens of a chunk, G chunks,
S shared width of queries and keys, E inner width.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lln.checks.names import check_choice
from lln.errors import InvalidInputError
from lln.precision import accumulation_dtype, without_autocast
from lln_lab.peers.linear import earlier_sums
from lln_lab.peers.option_checks import check_counts
from lln_lab.peers.peer import Card, Host, Mask, Peer, zero_padding
from lln_lab.peers.rotary import check_even, frequencies, rotate
from lln_lab.peers.token_blocks import cut

# Chunks up to here have one bias for every distance, longer ones a product of two vectors.
LONGEST_TABLE = 512


class Flash(Peer):
    """O = x + W_o[u ⊙ (quad + lin)] from xn = LayerNorm(x).

    u = silu(W_u xn), v = silu(W_v xn), z = silu(W_z xn); queries and keys are four affine maps
    γz + β with rotary positions. In every chunk quad = relu(q kᵀ/C + bias)² v, and across chunks
    lin = c q'(Σ k'ᵀ v); causal: over earlier chunks only. There are no heads. One layer replaces
    attention or feed-forward, so a model has twice as many layers.

    Args:
        chunk: C; with C ≥ N and `linear` off it is FLASH-quad.
        key_width: S.
        expansion: E / W.
        scale: c: ``"chunk"`` 1/C, ``"tokens"`` 1/N with N the real tokens of the sample.
        linear: Whether there is the linear branch.
        rope: Whether queries and keys have rotary positions.
    """

    card = Card(
        name="flash",
        title="FLASH (GAU, mixed chunk attention)",
        kind="block",
        citation="Hua et al. 2022, arXiv 2202.10447",
        equation="O = x + W_o[u ⊙ (relu(qkᵀ/C + b)² v in chunks + q'(Σ k'ᵀv)/C)]",
        complexity="O(N C E + N S E)",
        row_stochastic=False,
        adds="replaces the layer: u, v, out of width 2, z of width 128, 8·128 gains and shifts, "
        "2C − 1 biases",
        layers_per_block=2,
        oracle="flash_pytorch FLASH; dense form",
        departures="Padding is masked; the code behind Table 1 reads no mask and has C = 64. "
        "scale='tokens' is FLASH-pytorch's. Biases beyond the chunk are not kept.",
    )

    def __init__(
        self,
        host: Host,
        *,
        chunk: int = 256,
        key_width: int = 128,
        expansion: int = 2,
        scale: Literal["chunk", "tokens"] = "chunk",
        linear: bool = True,
        rope: bool = True,
    ) -> None:
        super().__init__(host)
        check_counts(chunk=chunk, key_width=key_width, expansion=expansion)
        check_choice("scale", scale, ("chunk", "tokens"))
        if scale == "tokens" and host.is_causal:
            raise InvalidInputError(
                "scale='tokens' counts later tokens; take scale='chunk' where is_causal=True."
            )
        if rope or chunk > LONGEST_TABLE:
            check_even("key_width", key_width)
        width, inner = host.embed_dim, expansion * host.embed_dim
        self.chunk, self.scale, self.linear, self.rope = chunk, scale, linear, rope
        self.norm = nn.LayerNorm(width)
        self.gate, self.value = nn.Linear(width, inner), nn.Linear(width, inner)
        self.shared = nn.Linear(width, key_width)
        # Rows: query and key of the chunk, query and key across chunks.
        sides = 4 if linear else 2
        self.gains = nn.Parameter(0.02 * torch.randn(sides, key_width))
        self.shifts = nn.Parameter(torch.zeros(sides, key_width))
        self.bias = ChunkBias(chunk, key_width)
        self.out = nn.Linear(inner, width)

    def mix(self, x: Tensor, key_mask: Mask) -> Tensor:
        normed = self.norm(x)
        # Neither branch has a denominator: a key without a value is no key.
        value = zero_padding(F.silu(self.value(normed)), key_mask)
        shared = F.silu(self.shared(normed))
        with without_autocast(x):
            mixed = self._attend(shared, value, key_mask)
        return x + self.out(F.silu(self.gate(normed)) * mixed.to(value.dtype))

    def _attend(self, shared: Tensor, value: Tensor, key_mask: Mask) -> Tensor:
        """Both branches, quad + lin ``[B, N, E]`` of z ``[B, N, S]`` and v ``[B, N, E]``."""
        wide = accumulation_dtype(value.dtype)
        gains, shifts = self.gains.to(wide)[:, None, None], self.shifts.to(wide)[:, None, None]
        sides = gains * shared.to(wide) + shifts
        if self.rope:
            sides = rotate(sides, frequencies(shared.shape[-1], wide, shared.device))
        tokens = value.shape[1]
        # A sequence shorter than a chunk is not filled up; C in the formula stays.
        length = min(self.chunk, tokens)
        values = cut(value.to(wide), length)
        query, key = (cut(side, length) for side in sides[:2])
        weights = (query @ key.mT / self.chunk + self.bias(length).to(wide)).relu().square()
        out = (weights.tril() if self.host.is_causal else weights) @ values
        if self.linear:
            query, key = (cut(side, length) for side in sides[2:])
            out = out + query @ self._summary(key, values, tokens, key_mask)
        return out.flatten(1, 2)[:, :tokens]

    def _summary(self, key: Tensor, values: Tensor, tokens: int, key_mask: Mask) -> Tensor:
        """The sum c Σ k'ᵀ v ``[B, 1, S, E]``, or of the chunks before each ``[B, G, S, E]``."""
        if self.host.is_causal:
            return earlier_sums(key.mT @ values / self.chunk, 1)
        state = (key.flatten(1, 2).mT @ values.flatten(1, 2)).unsqueeze(1)
        if self.scale == "chunk":
            return state / self.chunk
        if key_mask is None:
            return state / tokens
        return state / key_mask.sum(-1).clamp_min(1)[:, None, None, None]


class ChunkBias(nn.Module):
    """What is added to the scores inside a chunk: bias_ij by j − i.

    Up to 512 tokens a table of 2C − 1 numbers; for longer chunks a_i·b_j, two learned vectors with
    rotary positions.
    """

    def __init__(self, chunk: int, width: int) -> None:
        """Args: chunk is C, width that of the vectors."""
        super().__init__()
        self.chunk = chunk
        shape = (2 * chunk - 1,) if chunk <= LONGEST_TABLE else (2, width)
        self.weight = nn.Parameter(0.02 * torch.randn(shape))

    def forward(self, length: int) -> Tensor:
        """``[length, length]`` for the first `length` tokens of a chunk."""
        wide = accumulation_dtype(self.weight.dtype)
        if self.weight.dim() == 1:
            near = self.weight.to(wide)[self.chunk - length : self.chunk + length - 1]
            # Windows, not an index: its gradient would be added up in any order, on a CPU too.
            return near.unfold(0, length, 1).flip(0)
        angles = frequencies(self.weight.shape[-1], wide, self.weight.device)
        rows, columns = rotate(self.weight[:, None, :].expand(-1, length, -1), angles)
        return rows @ columns.mT
