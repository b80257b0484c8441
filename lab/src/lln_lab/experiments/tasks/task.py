"""One form for all tasks: token ids with labels, in three parts.

Every loader and generator returns a `Task`; the harness knows nothing else about them.

Dimension legend: n examples, N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

PAD = 0
# The label of a place that nothing is asked about; what PyTorch's losses leave out.
NO_QUESTION = -100


class Examples(Dataset):
    """Examples of one part, padded to one length.

    Args:
        ids: int ``[n, N]``; `PAD` where there is no token.
        labels: int ``[n]`` for one class per example, or ``[n, N]`` for one token per place
            (`NO_QUESTION` = nothing is asked there).
        lengths: int ``[n]``, the tokens of every example; None = all N.
    """

    def __init__(
        self, ids: np.ndarray, labels: np.ndarray, lengths: np.ndarray | None = None
    ) -> None:
        """Keep the arrays as they are: small types save memory."""
        if len(ids) != len(labels) or (lengths is not None and len(lengths) != len(ids)):
            raise ValueError("ids, labels and lengths must have as many entries")
        self.ids, self.labels, self.lengths = ids, labels, lengths

    def __len__(self) -> int:
        """N."""
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """What a Hugging Face model takes; see `__getitems__`."""
        return {name: side[0] for name, side in self.__getitems__([index]).items()}

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """A batch at once: ``input_ids``, ``labels``, and ``attention_mask`` if lengths differ.

        Without a mask systems have less to do. Goes with `as_batch`.
        """
        batch = {
            "input_ids": torch.from_numpy(self.ids[indices].astype(np.int64)),
            "labels": torch.from_numpy(np.asarray(self.labels[indices]).astype(np.int64)),
        }
        if self.lengths is not None:
            batch["attention_mask"] = self._mask(self.lengths[indices]).long()
        return batch

    def _mask(self, lengths: np.ndarray) -> Tensor:
        """Which tokens are there: bool ``[n, N]``."""
        return torch.arange(self.ids.shape[1]) < torch.from_numpy(lengths)[:, None]

    def first(self, count: int | None) -> Examples:
        """The first examples; None = all."""
        if count is None:
            return self
        lengths = None if self.lengths is None else self.lengths[:count]
        return Examples(self.ids[:count], self.labels[:count], lengths)


def as_batch(entries: Any) -> dict[str, Tensor]:
    """For a DataLoader: what ``__getitems__`` gave is a batch already."""
    return entries if isinstance(entries, dict) else default_collate(entries)


@dataclass(frozen=True)
class Task:
    """Three parts of one task.

    Attributes:
        name: Short, for files and tables.
        title: For readers; says what it is and what it is not.
        classes: Number of classes; 0 = labels are tokens.
        vocabulary: Token ids are below this.
        train: To train on.
        valid: To choose a checkpoint by.
        test: To report.
        pairs: Whether an example is two texts of N / 2 tokens each, encoded apart.
    """

    name: str
    title: str
    classes: int
    vocabulary: int
    train: Examples
    valid: Examples
    test: Examples
    pairs: bool = False

    def first(self, train: int | None, rest: int | None) -> Task:
        """A smaller task: the first examples of every part."""
        return replace(
            self,
            train=self.train.first(train),
            valid=self.valid.first(rest),
            test=self.test.first(rest),
        )


def padded(texts: list[np.ndarray], length: int, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Token sequences cut and padded to one length: ids ``[n, N]`` and lengths ``[n]``."""
    ids = np.full((len(texts), length), PAD, dtype=dtype)
    lengths = np.array([min(len(text), length) for text in texts], dtype=np.int32)
    for row, text, count in zip(ids, texts, lengths, strict=True):
        row[:count] = text[:count]
    return ids, lengths
