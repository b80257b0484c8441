"""Text for masked-language modelling: articles, their tokens in windows, and hidden tokens.

The articles of a part are joined, with an end token after each, and cut into windows of N tokens;
what is left over at the end is dropped. 15 % of the tokens are *hidden*: of these, 80 % become the
mask token, 10 % a random token, and 10 % stay; the model has to name all of them (BERT's recipe).
Train is hidden anew whenever an example is read, as RoBERTa does it; valid and test are hidden
once, so that losses can be compared.

Two sets: ``wikitext-2`` (words apart, rare ones replaced by ``<unk>``), with its official parts,
and ``wikipedia-en`` (natural text), whose file ``valid`` is the test part, and whose valid is cut
off train. Neither is WikiText-103, and perplexities are not comparable with it.

A `TextCode` says how text becomes tokens: `byte_code` needs nothing, `train_bpe` learns a
byte-level BPE with the package ``tokenizers``.

Dimension legend: n windows, N tokens.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lln.errors import InvalidInputError
from lln_lab.experiments.tasks.byte_tokens import BYTE_VOCABULARY, byte_ids
from lln_lab.experiments.tasks.data_folder import read_text
from lln_lab.experiments.tasks.task import NO_QUESTION, Examples, Task

SETS = ("wikitext-2", "wikipedia-en")

# WikiText's heading of an article; other lines of this form have no empty lines around them.
_HEADING = re.compile(r"(?<=\n \n)(?= = [^=\n][^\n]* = \n \n)")


@dataclass(frozen=True)
class TokenIds:
    """Which token ids mean what; id 0 is padding.

    Attributes:
        vocabulary: Token ids are below this.
        mask: Id that stands for a hidden token.
        end: Id after every article.
        plain: Ids that a hidden token may be replaced by: from the first to before the second.
    """

    vocabulary: int
    mask: int
    end: int
    plain: tuple[int, int]


@dataclass(frozen=True)
class TextCode(TokenIds):
    """How text becomes tokens.

    Attributes:
        encode: Text → token ids, without special tokens.
    """

    encode: Callable[[str], Sequence[int] | np.ndarray]


def byte_code() -> TextCode:
    """Bytes as tokens: ids 1 to 256, then mask and end."""
    return TextCode(
        encode=byte_ids,
        vocabulary=BYTE_VOCABULARY + 2,
        mask=BYTE_VOCABULARY,
        end=BYTE_VOCABULARY + 1,
        plain=(1, BYTE_VOCABULARY),
    )


def train_bpe(articles: Iterable[str], vocabulary: int = 8192) -> TextCode:
    """Learn a byte-level BPE from articles: of train only, or the others are no longer unseen.

    Args:
        articles: Texts to learn from.
        vocabulary: Most tokens, with the three special ones and the 256 bytes.

    Raises:
        InvalidInputError: If the package ``tokenizers`` is missing.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise InvalidInputError(
            "a BPE needs the package tokenizers; pip install 'lln[hf]', or take bytes as tokens."
        ) from error
    special = ["<pad>", "<mask>", "</s>"]
    learned = tokenizers.ByteLevelBPETokenizer()
    learned.train_from_iterator(
        articles, vocab_size=vocabulary, special_tokens=special, show_progress=False
    )
    size = learned.get_vocab_size()
    return TextCode(
        encode=partial(_bpe_ids, learned._tokenizer),
        vocabulary=size,
        mask=1,
        end=2,
        plain=(len(special), size),
    )


def _bpe_ids(learned: Any, text: str) -> list[int]:
    return learned.encode(text).ids


def read_articles(folder: Path | None, data_set: str, part: str) -> list[str]:
    """The articles of a part, each with its title in the first line.

    Args:
        folder: See `data_folder`.
        data_set: One of `SETS`.
        part: ``"train"``, ``"valid"``, and for ``wikitext-2`` ``"test"``.
    """
    if data_set not in SETS:
        raise InvalidInputError(f"no text is called {data_set!r}; there are {' and '.join(SETS)}.")
    text = read_text(folder, data_set, part)
    pieces = _HEADING.split("\n" + text) if data_set == "wikitext-2" else text.split("\n\n")
    return [piece.strip() for piece in pieces if piece.strip()]


def cut_windows(articles: Iterable[str], code: TextCode, length: int) -> np.ndarray:
    """Tokens of the articles in windows: int32 ``[n, N]``.

    Raises:
        InvalidInputError: If there is not one window, or a token is not in the vocabulary.
    """
    end = np.array([code.end])
    pieces = [piece for text in articles for piece in (np.asarray(code.encode(text)), end)]
    stream = np.concatenate(pieces or [end[:0]]).astype(np.int32)
    count = len(stream) // length
    if not count:
        raise InvalidInputError(
            f"the text has {len(stream)} tokens, fewer than one window of {length}; choose shorter "
            "windows or a larger text."
        )
    if not 0 <= stream.min() <= stream.max() < code.vocabulary:
        raise InvalidInputError(
            f"encode gave token ids from {stream.min()} to {stream.max()}, but the vocabulary is "
            f"{code.vocabulary}; pass the size that goes with the tokenizer."
        )
    return stream[: count * length].reshape(count, length)


def hide(
    ids: np.ndarray, code: TokenIds, random: np.random.Generator, share: float = 0.15
) -> tuple[np.ndarray, np.ndarray]:
    """Hide some tokens.

    Args:
        ids: int ``[..., N]``.
        code: See `TokenIds`; only plain tokens are hidden.
        random: Where the choice comes from.
        share: Probability that a token is hidden.

    Returns:
        What the model sees, and the labels: the token where one is hidden, `NO_QUESTION` elsewhere.
    """
    low, high = code.plain
    hidden = (random.random(ids.shape) < share) & (ids >= low) & (ids < high)
    fate = random.random(ids.shape)
    seen = np.where(hidden & (fate < 0.8), code.mask, ids)
    replaced = hidden & (fate >= 0.8) & (fate < 0.9)
    seen = np.where(replaced, random.integers(low, high, ids.shape), seen)
    return seen.astype(ids.dtype), np.where(hidden, ids, NO_QUESTION).astype(np.int32)


class FreshlyHidden(Examples):
    """Windows whose tokens are hidden anew in every epoch.

    Epoch and window alone decide which: a training that was stopped goes on with the same tokens,
    whatever was read ahead, and every method sees the same.

    Args:
        ids: int ``[n, N]``.
        code: See `TokenIds`.
        share: See `hide`.
    """

    def __init__(self, ids: np.ndarray, code: TokenIds, share: float) -> None:
        """Labels are the tokens themselves until they are read."""
        super().__init__(ids, ids)
        self.code, self.share, self.epoch = code, share, 0

    def set_epoch(self, epoch: int) -> None:
        """Hide other tokens from now on."""
        self.epoch = epoch

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """As in `Examples`."""
        rows = [
            hide(self.ids[index], self.code, np.random.default_rng([self.epoch, index]), self.share)
            for index in indices
        ]
        seen, labels = (np.stack(side) for side in zip(*rows, strict=True))
        return Examples(seen, labels).__getitems__(list(range(len(indices))))

    def first(self, count: int | None) -> FreshlyHidden:
        """The first windows; None = all."""
        return FreshlyHidden(self.ids[:count], self.code, self.share)


def split_articles(folder: Path | None, data_set: str, share: float = 0.03) -> dict[str, list[str]]:
    """Articles of ``train``, ``valid`` and ``test``.

    Args:
        folder: See `data_folder`.
        data_set: One of `SETS`.
        share: Share of the articles of train that becomes valid; ``wikitext-2`` has its own.
    """
    if data_set == "wikitext-2":
        return {part: read_articles(folder, data_set, part) for part in ("train", "valid", "test")}
    articles = read_articles(folder, data_set, "train")
    count = round(share * len(articles))
    ranked = sorted(articles, key=lambda text: hashlib.sha256(text.encode("utf-8")).digest())
    out = set(ranked[:count])
    return {
        "train": [text for text in articles if text not in out],
        "valid": [text for text in articles if text in out],
        "test": read_articles(folder, data_set, "valid"),
    }


def masked_text(
    articles: dict[str, list[str]],
    code: TextCode,
    name: str,
    length: int = 512,
    share: float = 0.15,
) -> Task:
    """The task.

    Args:
        articles: Articles of ``train``, ``valid`` and ``test``; see `split_articles`.
        code: See `TextCode`.
        name: Name of the set, for the title.
        length: N.
        share: See `hide`.
    """
    windows = {part: cut_windows(texts, code, length) for part, texts in articles.items()}
    valid, test = (
        Examples(*hide(windows[part], code, np.random.default_rng(seed), share))
        for seed, part in enumerate(("valid", "test"))
    )
    return Task(
        name=f"masked-{name}",
        title=f"masked-language modelling of {name}; not WikiText-103",
        classes=0,
        vocabulary=code.vocabulary,
        train=FreshlyHidden(windows["train"], code, share),
        valid=valid,
        test=test,
    )
