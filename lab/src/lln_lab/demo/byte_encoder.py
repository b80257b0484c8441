"""A byte-level encoder small enough to train in seconds, with any attention.

Dimension legend: B batch, T tokens, W width of the model, H heads, D head width, M masked tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln.functional.dense import block_diagonal_attention, lln_attention, lln_diag_attention
from lln.functional.exact_keys import lln_keys_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

BYTES = 256
MASK = BYTES


@dataclass(frozen=True)
class EncoderSize:
    """Sizes of the encoder; the block size equals the head width, as in the paper."""

    length: int = 256
    width: int = 64
    heads: int = 4
    layers: int = 2

    @property
    def block_size(self) -> int:
        """Tokens in a diagonal block."""
        return self.width // self.heads


def trained_attentions(block_size: int) -> dict[str, Attention]:
    """The attentions that the demo trains, each as ``f(query, key, value)``."""
    return {
        "softmax": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        "lln": lambda q, k, v: lln_attention(q, k, v),
        "diag": lambda q, k, v: block_diagonal_attention(q, k, v, block_size=block_size),
        "lln_diag": lambda q, k, v: lln_diag_attention(q, k, v, block_size=block_size),
        "lln_keys": lambda q, k, v: lln_keys_attention(
            q, k, v, keys=block_size, block_size=block_size
        ),
    }


class ByteEncoder(nn.Module):
    """Pre-norm encoder with learned positions."""

    def __init__(self, size: EncoderSize, attention: Attention, log_frequency: Tensor) -> None:
        """Starts with predictions by byte frequency; ``log_frequency`` is ``[256]``.

        The same seed gives the same weights for every attention, because none has its own weights.
        """
        super().__init__()
        self.embedding = nn.Embedding(BYTES + 1, size.width)
        nn.init.normal_(self.embedding.weight, std=0.5)
        self.position = nn.Parameter(_waves(size.length, size.width))
        self.layers = nn.ModuleList(ByteEncoderLayer(size, attention) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, BYTES)
        nn.init.zeros_(self.head.weight)
        with torch.no_grad():
            self.head.bias.copy_(log_frequency)

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """Logits ``[M, 256]`` of the chosen positions; tokens int64 and chosen bool ``[B, T]``."""
        hidden = self.embedding(tokens) + self.position
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden[chosen]))


class ByteEncoderLayer(nn.Module):
    """Attention and a feed-forward network, each with a norm before it and a residual."""

    def __init__(self, size: EncoderSize, attention: Attention) -> None:
        """Queries and keys start equal, so that similar positions attend to each other at once."""
        super().__init__()
        self.attention, self.heads = attention, size.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        nn.init.normal_(self.qkv.weight, std=size.width**-0.5)
        with torch.no_grad():
            query, key, _ = self.qkv.weight.chunk(3)
            key.copy_(query)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.up = nn.Linear(size.width, 2 * size.width)
        self.down = nn.Linear(2 * size.width, size.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states ``[B, T, W]`` to ``[B, T, W]``."""
        split = self.qkv(self.attention_norm(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)  # [B, H, T, D] each
        attended = self.attention(query, key, value).transpose(1, 2).flatten(-2)
        hidden = hidden + self.out(attended)
        return hidden + self.down(F.relu(self.up(self.mlp_norm(hidden))))


def _waves(length: int, width: int) -> Tensor:
    """Sines and cosines as initial learned positions, so that neighbours are similar."""
    frequency = torch.exp(-math.log(300.0) * torch.arange(0, width, 2) / width)
    angle = torch.arange(length)[:, None] * frequency
    return torch.cat((angle.sin(), angle.cos()), dim=-1)
