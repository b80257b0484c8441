"""Retrieval whose negative pairs look like the positive ones to whoever only counts bytes.

The question is that of `retrieval`: are two texts parts of one article? There,
counts of bytes answer nine pairs in ten, because a biography and a list of results differ in
digits and capitals. Here every first part gets the second part of its own article and of another
one, chosen so that the byte counts are as similar in both pairs: in their cosine, and to a judge,
a logistic regression that was fitted to pairs matched in the cosine alone. Every text is in one
positive and in one negative pair, and both texts of a pair have one length, so neither a text by
itself nor a length says anything.

Dimension legend: n articles or pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from lln_lab.experiments.tasks.byte_tokens import BYTE_VOCABULARY
from lln_lab.experiments.tasks.masked_text import read_articles
from lln_lab.experiments.tasks.retrieval import (
    CUT,
    LEAST,
    Pair,
    _digest,
    _examples,
    _halves,
    _split,
)
from lln_lab.experiments.tasks.task import Task

# Articles of similar length among which partners are found.
TOGETHER = 700
# What a judge's unit counts beside one of cosine.
JUDGED = 0.02

Match = Callable[[np.ndarray, np.ndarray], np.ndarray]


def shares(texts: list[bytes]) -> np.ndarray:
    """Square roots of the shares of all bytes, float32 ``[n, 256]``: vectors of length one."""
    counts = [np.bincount(np.frombuffer(text, np.uint8), minlength=256) for text in texts]
    return np.sqrt(np.stack(counts) / np.array([[max(len(text), 1)] for text in texts])).astype(
        np.float32
    )


class Judge(NamedTuple):
    """Scores a pair by its byte counts; above zero = one article.

    Attributes:
        weights: ``[512]``, of the absolute differences and the products of the shares.
        bias: A number.
        mean: ``[512]``, what is taken off the features.
        scale: ``[512]``, what they are divided by.
    """

    weights: np.ndarray
    bias: float
    mean: np.ndarray
    scale: np.ndarray

    def __call__(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Scores of pairs whose shares broadcast."""
        seen = np.clip((features(first, second) - self.mean) / self.scale, -5, 5)
        return seen @ self.weights + self.bias


def features(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """What a judge looks at, ``[..., 512]``."""
    first, second = np.broadcast_arrays(first, second)
    return np.concatenate([np.abs(first - second), first * second], axis=-1)


def fitted_judge(
    first: np.ndarray, second: np.ndarray, labels: np.ndarray, decay: float = 1e-2
) -> Judge:
    """A logistic regression on pairs, with a penalty on its weights."""
    seen = features(first, second)
    mean, scale = seen.mean(0), seen.std(0)
    # Bytes that hardly occur would be blown up.
    scale = scale + 1e-4 * scale.max()
    inputs = torch.from_numpy(np.clip((seen - mean) / scale, -5, 5))
    wanted = torch.from_numpy(labels.astype(np.float32))
    weights = torch.zeros(inputs.shape[1], requires_grad=True)
    bias = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS([weights, bias], max_iter=60)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(inputs @ weights + bias, wanted)
        loss = loss + decay * weights.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return Judge(weights.detach().numpy(), bias.item(), mean, scale)


def matched_pairs(
    articles: dict[str, list[str]], most: int, place: float, judge: Judge | None = None
) -> list[Pair]:
    """Two pairs per article, matched; in a fixed shuffled order.

    Args:
        articles: Title → paragraphs; those without two parts of `LEAST` bytes are left out.
        most: Bytes kept of a text.
        place: Where the first part ends, as a share of the bytes.
        judge: Whose scores are matched beside the cosine; None = the cosine alone.
    """
    halves = {title: _halves(paragraphs, place) for title, paragraphs in articles.items()}
    sizes = {title: min(len(first), len(second), most) for title, (first, second) in halves.items()}
    usable = [title for title, size in sizes.items() if size >= LEAST]
    usable.sort(key=lambda title: (sizes[title], _digest(f"{place}:{title}")))
    pairs = []
    windows = max(len(usable) // TOGETHER, 1)
    for window in np.array_split(np.array(usable, dtype=object), windows):
        titles = list(window)
        if len(titles) < 2:
            continue
        size = min(sizes[title] for title in titles)
        sides = [[halves[title][side][:size] for title in titles] for side in (0, 1)]
        partners = _partners(shares(sides[0]), shares(sides[1]), judge)
        for one, other in enumerate(partners):
            for second in (one, other):
                texts = (sides[0][one], sides[1][second])
                pairs.append(Pair(texts, (titles[one], titles[second])))
    return sorted(pairs, key=lambda pair: _digest("\n".join((*pair.titles, str(place)))))


def _partners(first: np.ndarray, second: np.ndarray, judge: Judge | None) -> np.ndarray:
    """Whose second part goes with every first part, ``[n]``: each once, nobody its own."""
    from scipy.optimize import linear_sum_assignment

    cost = _unlike(first @ second.T)
    if judge is not None:
        # A row at a time: the features of all pairs together take gigabytes.
        cost += JUDGED * _unlike(np.stack([judge(row, second) for row in first]))
    np.fill_diagonal(cost, 1e6)
    return linear_sum_assignment(cost)[1]


def _unlike(scores: np.ndarray) -> np.ndarray:
    """How far the score of every pair is from those of both its texts with their own partners."""
    own = np.diag(scores)
    return np.abs(scores - own[:, None]) + np.abs(scores - own)


def judged(pairs: list[Pair]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shares of both texts of all pairs, and their labels."""
    sides = [shares([pair.texts[side] for pair in pairs]) for side in (0, 1)]
    return sides[0], sides[1], np.array([pair.label for pair in pairs])


def matched_parts(
    folder: Path | None, most: int = CUT, rounds: int = 1, share: float = 0.1
) -> dict[str, list[Pair]]:
    """Pairs of ``train``, ``valid`` and ``test``; an article belongs to one of them.

    Args:
        folder: See `data_folder`.
        most: Bytes kept of a text.
        rounds: How often an article of train is used, parted elsewhere each time.
        share: Share of the articles that becomes valid, and again as many test.
    """
    articles = dict(
        _split(article)
        for part in ("train", "valid")
        for article in read_articles(folder, "wikipedia-en", part)
    )
    order = sorted(articles, key=_digest)
    count = round(share * len(order))
    chosen = {
        "train": {title: articles[title] for title in order[2 * count :]},
        "valid": {title: articles[title] for title in order[:count]},
        "test": {title: articles[title] for title in order[count : 2 * count]},
    }
    judge = fitted_judge(*judged(matched_pairs(chosen["train"], most, 0.5)))
    places = {
        "train": [(turn + 1) / (rounds + 1) for turn in range(rounds)],
        "valid": [0.5],
        "test": [0.5],
    }
    return {
        part: [pair for place in places[part] for pair in matched_pairs(own, most, place, judge)]
        for part, own in chosen.items()
    }


def matched_retrieval(
    folder: Path | None, length: int = 4096, cut: int = CUT, rounds: int = 1
) -> Task:
    """The task; see `matched_parts`, length is that of a text in tokens."""
    parts = matched_parts(folder, min(cut, length), rounds)
    return Task(
        name="retrieval-matched",
        title="Are two texts parts of one Wikipedia article, where byte counts do not tell? "
        "In place of LRA Retrieval; not AAN",
        classes=2,
        vocabulary=BYTE_VOCABULARY,
        **{part: _examples(pairs, length) for part, pairs in parts.items()},
        pairs=True,
    )
