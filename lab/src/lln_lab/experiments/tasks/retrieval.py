"""Are two texts parts of one article? Byte-level retrieval, in place of Long Range Arena's AAN.

LRA asks whether one paper cites the other, on a set (AAN) that is not in the data folder. This
task has the same form, two long texts encoded apart and compared at the end, with another
question: positive pairs are the two halves of one Wikipedia article, negative pairs are halves of
two articles. Numbers are not comparable with LRA's.

No shortcut tells the classes apart. Two articles of similar length make four pairs,

    (first half of a, second of a)  positive      (first half of a, second of b)  negative
    (first half of b, second of b)  positive      (first half of b, second of a)  negative

and all four halves are cut to one length. So every text occurs as often in a positive as in a
negative pair, and lengths say nothing. Titles are left out. An article belongs to one of train,
valid and test.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lln.errors import InvalidInputError
from lln_lab.experiments.tasks.byte_tokens import BYTE_VOCABULARY, byte_ids
from lln_lab.experiments.tasks.masked_text import read_articles
from lln_lab.experiments.tasks.task import Examples, Task, padded

CUT = 4000
# Shorter halves say too little about their article.
LEAST = 256


class PairExamples(Examples):
    """Examples of two texts, each with padding of its own.

    Args:
        ids: int ``[n, N]``; the second text starts at N / 2.
        labels: int ``[n]``.
        lengths: int ``[n, 2]``, the tokens of both texts.
    """

    lengths: np.ndarray

    def __init__(self, ids: np.ndarray, labels: np.ndarray, lengths: np.ndarray) -> None:
        """See the class."""
        super().__init__(ids, labels, lengths)

    def _mask(self, lengths: np.ndarray) -> Tensor:
        """That of both texts, one after the other."""
        places = torch.arange(self.ids.shape[1] // 2)
        return (places < torch.from_numpy(lengths)[:, :, None]).flatten(1)

    def first(self, count: int | None) -> PairExamples:
        """The first examples; None = all."""
        return PairExamples(self.ids[:count], self.labels[:count], self.lengths[:count])


@dataclass(frozen=True)
class Pair:
    """Two texts, and the articles they are from.

    Attributes:
        texts: UTF-8; both of one length, the last character perhaps cut.
        titles: Titles of the articles.
    """

    texts: tuple[bytes, bytes]
    titles: tuple[str, str]

    @property
    def label(self) -> int:
        """1 if both are from one article."""
        return int(self.titles[0] == self.titles[1])


def retrieval(
    folder: Path | None, length: int = 4096, cut: int = CUT, rounds: int = 1, share: float = 0.1
) -> Task:
    """The task, from all articles of ``wikipedia-en``.

    Args:
        folder: See `data_folder`.
        length: Tokens per text, N / 2. The median half has 1,424 bytes.
        cut: Bytes kept of a text, at most ``length``.
        rounds: How often an article of train is used, with another place between its halves and
            another partner each time.
        share: Share of the articles that becomes valid, and again as many test.
    """
    articles = dict(
        _split(article)
        for part in ("train", "valid")
        for article in read_articles(folder, "wikipedia-en", part)
    )
    order = sorted(articles, key=_digest)
    count = round(share * len(order))

    def examples(titles: list[str], turns: int) -> PairExamples:
        chosen = {title: articles[title] for title in titles}
        places = [(turn + 1) / (turns + 1) for turn in range(turns)]
        pairs = [pair for place in places for pair in article_pairs(chosen, most, place)]
        return _examples(pairs, length)

    most = min(cut, length)
    return Task(
        name="retrieval",
        title="Are two texts halves of one Wikipedia article? In place of LRA Retrieval; not AAN",
        classes=2,
        vocabulary=BYTE_VOCABULARY,
        train=examples(order[2 * count :], rounds),
        valid=examples(order[:count], 1),
        test=examples(order[count : 2 * count], 1),
        pairs=True,
    )


def article_pairs(articles: dict[str, list[str]], most: int, place: float = 0.5) -> list[Pair]:
    """Four pairs for every two articles, in a fixed shuffled order.

    Args:
        articles: Title → paragraphs. Articles without two halves of `LEAST` bytes are left out,
            and the last one of an odd number.
        most: Bytes kept of a text.
        place: Where the first "half" ends, as a share of the bytes; the end of a paragraph
            near it is taken.
    """
    halves = {title: _halves(paragraphs, place) for title, paragraphs in articles.items()}
    sizes = {title: min(len(first), len(second), most) for title, (first, second) in halves.items()}
    usable = [title for title, size in sizes.items() if size >= LEAST]
    usable.sort(key=lambda title: (sizes[title], _digest(f"{place}:{title}")))
    pairs = []
    for one, other in zip(usable[::2], usable[1::2], strict=False):
        size = min(sizes[one], sizes[other])
        for first in (one, other):
            for second in (one, other):
                texts = (halves[first][0][:size], halves[second][1][:size])
                pairs.append(Pair(texts, (first, second)))
    return sorted(pairs, key=lambda pair: _digest("\n".join((*pair.titles, str(place)))))


def _split(article: str) -> tuple[str, list[str]]:
    """Title and paragraphs."""
    title, *paragraphs = article.split("\n")
    return title.strip("= "), paragraphs


def _halves(paragraphs: list[str], place: float) -> tuple[bytes, bytes]:
    """The paragraphs before and after the end of one of them, the nearest to ``place``."""
    coded = [paragraph.encode("utf-8") for paragraph in paragraphs]
    if len(coded) < 2:
        return b"", b""
    ends = np.cumsum([len(paragraph) for paragraph in coded])[:-1]
    total = sum(len(paragraph) for paragraph in coded)
    last = int(np.abs(ends - place * total).argmin()) + 1
    return b"\n".join(coded[:last]), b"\n".join(coded[last:])


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8")).digest()


def _examples(pairs: list[Pair], length: int) -> PairExamples:
    if not pairs:
        raise InvalidInputError(
            f"wikipedia-en has too few articles with two parts of {LEAST} bytes; use a larger copy."
        )
    sides = [
        padded([byte_ids(pair.texts[side]) for pair in pairs], length, np.uint16) for side in (0, 1)
    ]
    return PairExamples(
        np.concatenate([ids for ids, _ in sides], axis=1),
        np.array([pair.label for pair in pairs], dtype=np.int64),
        np.stack([lengths for _, lengths in sides], axis=1),
    )
