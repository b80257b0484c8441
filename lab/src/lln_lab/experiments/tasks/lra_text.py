"""Text of Long Range Arena: is a film review positive, read byte by byte?

Reviews are cut at 4,000 bytes, as LRA cuts them, and padded to 4,096. Published code chooses the
checkpoint on the test set; here valid is cut off train, and test is only reported.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lln_lab.experiments.tasks.byte_tokens import BYTE_VOCABULARY, byte_ids
from lln_lab.experiments.tasks.data_folder import Row, read_rows
from lln_lab.experiments.tasks.held_out import held_out
from lln_lab.experiments.tasks.task import Examples, Task, padded

CUT = 4000


def lra_text(folder: Path | None, length: int = 4096, cut: int = CUT, share: float = 0.1) -> Task:
    """The task, from ``imdb/train.tsv`` and ``test.tsv`` (``.xz`` or not).

    Args:
        folder: See `data_folder`.
        length: N, to which reviews are padded.
        cut: Bytes kept of a review, at most ``length``.
        share: Share of train that becomes valid, the same of both classes.
    """
    rows = read_rows(folder, "imdb", "train", ("text",), classes=2)
    keys = [(row.texts[0].encode("utf-8"),) for row in rows]
    chosen = held_out(keys, [row.label for row in rows], share)
    train = [row for row, out in zip(rows, chosen, strict=True) if not out]
    valid = [row for row, out in zip(rows, chosen, strict=True) if out]
    test = read_rows(folder, "imdb", "test", ("text",), classes=2)
    return Task(
        name="text",
        title="LRA Text: a part of the IMDb reviews as bytes; valid is cut off train",
        classes=2,
        vocabulary=BYTE_VOCABULARY,
        train=_examples(train, length, cut),
        valid=_examples(valid, length, cut),
        test=_examples(test, length, cut),
    )


def _examples(rows: list[Row], length: int, cut: int) -> Examples:
    ids, lengths = padded([byte_ids(row.texts[0], cut) for row in rows], length, np.uint16)
    return Examples(ids, np.array([row.label for row in rows], dtype=np.int64), lengths)
