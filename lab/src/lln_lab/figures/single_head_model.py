"""A small RoBERTa with a single head per layer: masked language model, tied output (Figure 1).

Two changes let it learn within minutes: layers are pre-norm instead of post-norm, and positions
start as waves, so that neighbours are similar at first. Without them 400 updates of this size did
not get beyond predicting by byte frequency.

Dimension legend: B batch, T tokens, W width of the model and of its one head, M masked tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Text is read as bytes; one more token stands for what is masked.
BYTES = 256
MASK = BYTES


@dataclass(frozen=True)
class Size:
    """Sizes of the model: W, its layers and T."""

    width: int = 64
    layers: int = 6
    length: int = 128


class SingleHeadRoberta(nn.Module):
    """An encoder that predicts masked bytes."""

    def __init__(self, size: Size, log_frequency: Tensor) -> None:
        """Starts with predictions by byte frequency; ``log_frequency`` is ``[256]``."""
        super().__init__()
        self.embedding = nn.Embedding(BYTES + 1, size.width)
        self.position = nn.Parameter(_waves(size.length, size.width))
        self.norm = nn.LayerNorm(size.width)
        self.layers = nn.ModuleList(SingleHeadLayer(size) for _ in range(size.layers))
        self.head_norm = nn.LayerNorm(size.width)
        self.bias = nn.Parameter(log_frequency.clone())
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.constant_(self.head_norm.weight, 0.1)

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """Logits ``[M, 256]`` of the chosen positions; tokens int64 and chosen bool ``[B, T]``."""
        hidden = self.norm(self.embedding(tokens) + self.position)
        for layer in self.layers:
            hidden = layer(hidden)
        guess = self.head_norm(hidden[chosen])
        return F.linear(guess, self.embedding.weight[:BYTES], self.bias)


class SingleHeadLayer(nn.Module):
    """Attention with one head and a feed-forward network, each with a norm before it."""

    def __init__(self, size: Size) -> None:
        """The feed-forward network is four times as wide inside, as in RoBERTa."""
        super().__init__()
        width = size.width
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        for linear in (self.qkv, self.up):
            nn.init.normal_(linear.weight, std=width**-0.5)
        # Queries and keys have the initial spread of RoBERTa-base, 0.02·√768.
        nn.init.normal_(self.qkv.weight[: 2 * width], std=0.02 * (768 / width) ** 0.5)
        # What the layers add starts small, so that the sum over all of them does not grow.
        for linear in (self.out, self.down):
            nn.init.normal_(linear.weight, std=0.5 * (size.layers * linear.in_features) ** -0.5)
        for linear in (self.qkv, self.out, self.up, self.down):
            nn.init.zeros_(linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states ``[B, T, W]`` to ``[B, T, W]``."""
        query, key, value = self.qkv(self.attention_norm(hidden)).unsqueeze(1).chunk(3, -1)
        attended = F.scaled_dot_product_attention(query, key, value).squeeze(1)
        hidden = hidden + self.out(attended)
        return hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))


def _waves(length: int, width: int) -> Tensor:
    """Sines and cosines, ``[T, W]``."""
    frequency = torch.exp(-math.log(300.0) * torch.arange(0, width, 2) / width)
    angle = torch.arange(length)[:, None] * frequency
    return torch.cat((angle.sin(), angle.cos()), dim=-1)


def masked(tokens: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """BERT's masking: the tokens with some hidden, and which were chosen, ``[B, T]`` each.

    Of the chosen tokens 80 % are masked, 10 % replaced by any byte and 10 % left unchanged.
    """
    chosen = torch.rand(tokens.shape, generator=generator) < share
    fate = torch.rand(tokens.shape, generator=generator)
    other = torch.randint(BYTES, tokens.shape, generator=generator)
    shown = torch.where(chosen & (fate < 0.8), MASK, tokens)
    return torch.where(chosen & (fate >= 0.9), other, shown), chosen
