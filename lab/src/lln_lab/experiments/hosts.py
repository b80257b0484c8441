"""The models around an attention: the same for every method.

Each is an `lln_lab.peers.Encoder`, which puts the same residuals, norms and feed-forward around
every system, and a head for one kind of question. They take what Hugging Face's Trainer sends and
return a loss; `questions` says which answers to count.

Dimension legend: B batch, N tokens, W width, C classes, M questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lln_lab import peers
from lln_lab.experiments.calibrated import calibrate_while_training
from lln_lab.experiments.methods import Method
from lln_lab.experiments.random_keys import choose_at_random
from lln_lab.experiments.tasks.cats_dogs import PictureTask
from lln_lab.experiments.tasks.task import NO_QUESTION, Task
from lln_lab.peers.projected import Branched

INIT_STD = 0.02


@dataclass(frozen=True)
class Sizes:
    """Of an encoder.

    Attributes:
        layers: Layers of attention and feed-forward.
        width: W.
        heads: Divides the width.
        feed_forward: Inner width.
        length: The longest sequence.
        norm: ``"pre"`` or ``"post"``.
    """

    layers: int
    width: int
    heads: int
    feed_forward: int
    length: int
    norm: str = "pre"


def encoder(method: Method, sizes: Sizes, vocabulary: int | None) -> nn.Module:
    """An encoder with a method in every layer; two systems of a method alternate."""
    shared: dict[str, Any] = {"embed_dim": sizes.width, "num_heads": sizes.heads}
    shared |= {"max_len": sizes.length, **method.branches}
    (first, options), *others = method.systems
    built = peers.Encoder(
        first,
        depth=sizes.layers,
        feed_forward=sizes.feed_forward,
        vocabulary=vocabulary,
        norm=sizes.norm,
        **shared,
        **options,
    )
    for system, options in others:
        for place in range(1, len(built.layers), 2):
            built.layers[place].attention = peers.build(
                system, layer=place, layers=len(built.layers), **shared, **options
            )
    if method.draws_keys:
        choose_at_random(built)
    if method.calibrates:
        calibrate_while_training(built)
    if vocabulary is not None:
        for table in (built.word, built.position):
            nn.init.normal_(table.weight, std=INIT_STD)
    return built


class Classifier(nn.Module):
    """One class for a text, from the mean of its tokens; for two texts, from both means.

    Two texts are the halves of the ids. They are encoded apart, by the same encoder. Means over
    thousands of tokens hardly differ between texts, and a head that has to compare two of them does
    not begin to learn; so channels are brought to one scale first, by the statistics of the batch
    (under ``torchrun`` those of a process's share).
    """

    def __init__(self, method: Method, sizes: Sizes, task: Task) -> None:
        """Draw the weights of the encoder and of a head with one hidden layer."""
        super().__init__()
        self.pairs = task.pairs
        self.encoder = encoder(method, sizes, task.vocabulary)
        self.spread = nn.BatchNorm1d(sizes.width) if task.pairs else nn.Identity()
        inside = 4 * sizes.width if task.pairs else sizes.width
        self.head = nn.Sequential(
            nn.Linear(inside, sizes.feed_forward),
            nn.GELU(),
            nn.Linear(sizes.feed_forward, task.classes),
        )

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Loss and logits ``[B, C]``; no mask = nothing is padding."""
        mask = None if attention_mask is None else attention_mask.bool()
        if self.pairs:
            sides = (input_ids, mask)
            halves = [None if one is None else torch.cat(one.chunk(2, dim=1)) for one in sides]
            first, second = self._vectors(*halves).chunk(2)
            vectors = torch.cat([first, second, first - second, first * second], -1)
        else:
            vectors = self._vectors(input_ids, mask)
        logits = self.head(vectors).float()
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def questions(self, output: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
        """Answers and right answers, ``[M]`` each."""
        return output["logits"].argmax(-1), labels

    def _vectors(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        return self.spread(peers.masked_mean(self.encoder(ids, mask), mask))


class TokenModel(nn.Module):
    """A token at every place with a question: masked words, or recall.

    The output layer is the table of words, and it only sees the places with a question.
    """

    def __init__(self, method: Method, sizes: Sizes, task: Task) -> None:
        """Draw the weights."""
        super().__init__()
        self.encoder = encoder(method, sizes, task.vocabulary)
        self.bias = nn.Parameter(torch.zeros(task.vocabulary))

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Loss, and logits ``[M, vocabulary]`` of the questions in the order of the ids."""
        mask = None if attention_mask is None else attention_mask.bool()
        hidden = self.encoder(input_ids, mask)
        asked = labels != NO_QUESTION
        logits = (F.linear(hidden[asked], self.encoder.word.weight) + self.bias).float()
        return {"loss": F.cross_entropy(logits, labels[asked]), "logits": logits}

    def questions(self, output: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
        """Answers and right answers, ``[M]`` each."""
        return output["logits"].argmax(-1), labels[labels != NO_QUESTION]


class VisionModel(nn.Module):
    """One class for a picture: square patches as tokens, learned positions, their mean.

    The number of patches is the length of the sizes, so it decides the side of a patch.
    """

    def __init__(self, method: Method, sizes: Sizes, task: PictureTask) -> None:
        """Draw the weights."""
        super().__init__()
        side, channels = task.train.images.shape[1], task.train.images.shape[3]
        self.patch = side // math.isqrt(sizes.length)
        if (side // self.patch) ** 2 != sizes.length:
            raise ValueError(f"{sizes.length} patches do not cover {side} × {side} pixels")
        self.encoder = encoder(method, sizes, None)
        self.embed = nn.Linear(channels * self.patch**2, sizes.width)
        self.positions = nn.Parameter(torch.randn(sizes.length, sizes.width) * INIT_STD)
        self.head = nn.Linear(sizes.width, task.classes)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Loss and logits ``[B, C]``; pictures are ``[B, channels, side, side]``."""
        patches = F.unfold(2 * pixel_values - 1, self.patch, stride=self.patch).mT
        logits = self.head(self.encoder(self.embed(patches) + self.positions).mean(1)).float()
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def questions(self, output: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
        """Answers and right answers, ``[M]`` each."""
        return output["logits"].argmax(-1), labels


def started_host(method: Method, sizes: Sizes, task: Task | PictureTask, seed: int) -> nn.Module:
    """A host whose first weights are softmax's; see `same_start`."""
    return same_start(lambda name: host_of(Method.parse(name), sizes, task), method.name, seed)


def same_start(build: Callable[[str], nn.Module], name: str, seed: int) -> nn.Module:
    """A method's host whose first weights are softmax's, wherever both have the same ones.

    Systems draw different numbers of random weights, so a seed alone would give every method
    another start: embeddings, projections, norms and feed-forward are taken from the softmax host.

    Args:
        build: Makes the host of a method.
        name: Of the method.
        seed: Of the weights.
    """
    torch.manual_seed(seed)
    common = build("softmax").state_dict()
    torch.manual_seed(seed)
    host = build(name)
    own = host.state_dict()
    shared = {name for name in common.keys() & own.keys() if common[name].shape == own[name].shape}
    # A system with its own projections may have reasons for its own start.
    for name, module in host.named_modules():
        if isinstance(module, peers.Peer) and not isinstance(module, Branched):
            shared = {one for one in shared if not one.startswith(f"{name}.")}
    host.load_state_dict({name: common[name] for name in shared}, strict=False)
    return host


def host_of(method: Method, sizes: Sizes, task: Task | PictureTask) -> nn.Module:
    """The model for a task's kind of questions."""
    if isinstance(task, PictureTask):
        return VisionModel(method, sizes, task)
    return (Classifier if task.classes else TokenModel)(method, sizes, task)
