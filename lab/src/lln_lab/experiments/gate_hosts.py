"""The hosts of the recipes in which softmax learns.

They differ from those in `hosts` in what made softmax learn: norms before attention and on the
embeddings, a depthwise convolution of the values in every row or rotated positions, stems of
convolutions under pictures. All shapes are fixed, so that a training step can be captured.

Dimension legend: B batch, N tokens, W width, C classes, M questions per example.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lln.errors import InvalidInputError
from lln_lab.experiments.hosts import INIT_STD, Sizes, encoder
from lln_lab.experiments.methods import BRANCHES, Method
from lln_lab.experiments.tasks.task import PAD
from lln_lab.peers.peer import Core, Mask
from lln_lab.peers.projected import Branched, TokenConvolution
from lln_lab.peers.projections import join_heads, split_heads
from lln_lab.peers.registry import find
from lln_lab.peers.rotary import frequencies, rotate

# Their gated values are mixed by the distance of tokens: they need no convolution to see near ones.
PLACED = ("tnn", "flash")


@dataclass(frozen=True)
class Frame:
    """What stands around the attention of every row.

    Attributes:
        sizes: Of the encoder.
        convolution: Whether every row gets the convolution of its values.
        rotary: Whether queries and keys are turned by their places; then none are added.
    """

    sizes: Sizes
    convolution: bool = False
    rotary: bool = False


def framed_encoder(name: str, frame: Frame) -> nn.Module:
    """The encoder of a method, without embeddings."""
    # Nyströmformer brings a convolution of its own.
    own = name.startswith("nystromformer@") and "kernel=" in name
    wanted = frame.convolution and not own
    systems = [find(system) for system, _ in Method.parse(name).systems]
    branched = all(issubclass(system, (Core, Branched)) for system in systems)
    built = encoder(
        Method.parse(f"{name}+conv" if wanted and branched else name), frame.sizes, None
    )
    if wanted and not branched:
        for layer in built.layers:
            convolve_values(getattr(layer, "attention", layer))
    for module in built.modules():
        if isinstance(module, TokenConvolution):
            module.filter = ShiftedSum(module.filter)
        if frame.rotary and isinstance(module, Branched):
            module.heads = TurnedHeads(module.heads)
    if frame.rotary and not any(isinstance(module, Branched) for module in built.modules()):
        raise InvalidInputError(f"{name} has no heads to turn; run it with learned positions.")
    return built


def convolve_values(peer: Any) -> None:
    """Add the convolution of its values to a system that makes its heads by itself.

    Before the output projection, as in `Branched`; the projection is linear, so what it makes of
    the convolution can be added behind it.

    Raises:
        InvalidInputError: If it has no such values.
    """
    if peer.card.name in PLACED:
        return
    width, heads = peer.host.embed_dim, peer.host.num_heads
    maps = [getattr(peer, side, None) for side in ("value", "out")]
    if any(getattr(one, "weight", torch.empty(0)).shape != (width, width) for one in maps):
        raise InvalidInputError(
            f"{peer.card.name} has no values for the convolution of every row; run it without one."
        )
    peer.convolution = TokenConvolution(heads, BRANCHES["conv"]["convolution"])
    # A block has its residual and norms around `attend`; `mix` is nothing but the attention.
    part = "attend" if peer.card.kind == "block" else "mix"
    attend = getattr(peer, part)

    def both(x: Tensor, key_mask: Mask) -> Tensor:
        near = peer.convolution(split_heads(peer.value(x), heads), key_mask)
        return attend(x, key_mask) + F.linear(join_heads(near), peer.out.weight)

    setattr(peer, part, both)


class ShiftedSum(nn.Module):
    """A depthwise convolution over tokens as a sum of shifted values.

    The weights are those of the `torch.nn.Conv2d` it replaces; on a GPU the gradient of these few
    weights is many times faster this way.
    """

    def __init__(self, filters: nn.Conv2d) -> None:
        """Take the weights ``[H, 1, taps, 1]``."""
        super().__init__()
        self.weight = filters.weight

    def forward(self, value: Tensor) -> Tensor:
        """``[B, H, N, D]`` → the same."""
        tokens, taps = value.shape[2], self.weight.shape[2]
        padded = F.pad(value, (0, 0, taps // 2, taps // 2))
        weights = self.weight[:, 0].to(value.dtype)
        out = weights[:, :1] * padded[:, :, :tokens]
        for tap in range(1, taps):
            out = out + weights[:, tap, None] * padded[:, :, tap : tap + tokens]
        return out


class TurnedHeads:
    """Query, key and value of a layer, the first two turned by their places (RoPE)."""

    def __init__(self, heads: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]) -> None:
        """Keep what makes the heads."""
        self.heads = heads

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `Branched.heads`."""
        query, key, value = self.heads(x)
        angles = frequencies(query.shape[-1], torch.float32, query.device)
        query, key = (rotate(side, angles, halves=True).to(side.dtype) for side in (query, key))
        return query, key, value


class _Text(nn.Module):
    """Words and places, normed, then the encoder."""

    def __init__(self, name: str, frame: Frame, vocabulary: int) -> None:
        super().__init__()
        width = frame.sizes.width
        self.encoder = framed_encoder(name, frame)
        self.word = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.word.weight, std=INIT_STD)
        self.places = None
        if not frame.rotary:
            self.places = nn.Parameter(torch.randn(frame.sizes.length, width) * INIT_STD)
        self.norm = nn.LayerNorm(width)

    def encoded(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """``[B, N]`` → ``[B, N, W]``."""
        embedded = self.word(ids)
        if self.places is not None:
            embedded = embedded + self.places[: ids.shape[1]]
        return self.encoder(self.norm(embedded), mask)


class WordHost(_Text):
    """Names hidden words; every text has as many of them."""

    def __init__(self, name: str, frame: Frame, vocabulary: int) -> None:
        """Draw the weights."""
        super().__init__(name, frame, vocabulary)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, ids: Tensor, places: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Args: ids ``[B, N]``, places and labels of the hidden words ``[B, M]``."""
        hidden = self.encoded(ids)
        asked = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1])).flatten(0, 1)
        logits = (F.linear(asked, self.word.weight) + self.bias).float()
        return {"loss": F.cross_entropy(logits, labels.flatten()), "logits": logits}


class TreeHost(_Text):
    """One class for an expression, read at its first token, which is the outermost operator."""

    def __init__(self, name: str, frame: Frame, vocabulary: int, classes: int) -> None:
        """Draw the weights."""
        super().__init__(name, frame, vocabulary)
        self.head = nn.Linear(frame.sizes.width, classes)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Args: ids ``[B, N]``, labels ``[B]``."""
        logits = self.head(self.encoded(ids, ids != PAD)[:, 0]).float()
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class _Grid(nn.Module):
    """Tokens of a picture from a stem of convolutions, with sine positions that may move."""

    def __init__(self, name: str, frame: Frame, stem: nn.Module) -> None:
        super().__init__()
        side, width = math.isqrt(frame.sizes.length), frame.sizes.width
        self.stem, self.norm = stem, nn.LayerNorm(width)
        self.encoder = framed_encoder(name, frame)
        self.rows = nn.Parameter(sine_table(side, width))
        self.columns = nn.Parameter(sine_table(side, width))

    def encoded(self, planes: Tensor) -> Tensor:
        """``[B, channels, side, side]`` → ``[B, N, W]``."""
        tokens = self.norm(self.stem(planes).flatten(2).mT)
        places = torch.cat(
            [
                self.rows[:, None].expand(-1, len(self.columns), -1),
                self.columns[None].expand(len(self.rows), -1, -1),
            ],
            dim=-1,
        )
        return self.encoder(tokens + places.flatten(0, 1))


def sine_table(count: int, width: int) -> Tensor:
    """Sines and cosines of so many places, ``[count, width / 2]``; half of the channels each."""
    turns = torch.arange(count)[:, None] * frequencies(width // 2, torch.float32, theta=100.0)
    return torch.cat([turns.sin(), turns.cos()], dim=-1)


class PhotoHost(_Grid):
    """One class for a photo of 64 × 64, from the mean of 16 × 16 tokens."""

    def __init__(self, name: str, frame: Frame, classes: int) -> None:
        """Draw the weights."""
        width = frame.sizes.width
        stem = nn.Sequential(
            *_convolved(3, width // 4, 1),
            *_convolved(width // 4, width // 2, 2),
            *_convolved(width // 2, width, 2),
            nn.Conv2d(width, width, 1),
        )
        super().__init__(name, frame, stem)
        self.head = nn.Linear(width, classes)

    def forward(self, photos: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Args: photos ``[B, 3, 64, 64]`` from 0 to 1; labels ``[B, C]``, shares of the classes."""
        logits = self.head(self.encoded(4 * photos - 2).mean(1)).float()
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class PathHost(_Grid):
    """Are two discs the ends of one path; or, before, what is under the covered squares?

    Args:
        patch: Pixels of a token in both directions.
    """

    def __init__(self, name: str, frame: Frame, patch: int) -> None:
        """Draw the weights."""
        width = frame.sizes.width
        stem = nn.Sequential(
            nn.Conv2d(2, width // 2, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(width // 2, width, 3, stride=patch, padding=1),
        )
        super().__init__(name, frame, stem)
        self.patch = patch
        self.paint = nn.Linear(width, patch**2)
        # A mean over all tokens would hide the few under the discs.
        self.weigh = nn.Linear(width, 1)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 2))

    def forward(
        self, pixels: Tensor, labels: Tensor | None = None, covered: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Loss and logits.

        Args:
            pixels: ``[B, 32, 32]`` from 0 to 1.
            labels: ``[B]``.
            covered: Instead of labels, float ``[B, 32, 32]``, 1 = to be painted.
        """
        seen = pixels if covered is None else pixels * (1 - covered)
        flags = torch.zeros_like(pixels) if covered is None else covered
        hidden = self.encoded(torch.stack([seen, flags], dim=1))
        if covered is None:
            weights = self.weigh(hidden).softmax(1).to(hidden.dtype)
            logits = self.head((weights * hidden).sum(1)).float()
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}
        painted = self.paint(hidden).mT.unflatten(2, (len(self.rows), -1))
        painted = F.pixel_shuffle(painted, self.patch)[:, 0].float()
        wrong = F.binary_cross_entropy_with_logits(painted, pixels, reduction="none")
        return {"loss": (wrong * covered).sum() / covered.sum(), "logits": painted}


def _convolved(inside: int, outside: int, stride: int) -> list[Any]:
    return [
        nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
        nn.BatchNorm2d(outside),
        nn.GELU(),
    ]
