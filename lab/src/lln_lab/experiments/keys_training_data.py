"""Text of `keys_training`: tokenised once, then windows of it with masked tokens."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from lln.checks.reading import first_line, read_utf8
from lln.errors import InvalidInputError
from lln.files import compact_json, write_atomically
from lln_lab.experiments.tasks.data_folder import text_file

if TYPE_CHECKING:
    from lln_lab.experiments.keys_training import KeysCell

MASK = 0
SHARE_MASKED = 0.15
VALID_TOKENS = 524_288


def articles(folder: Path, part: str) -> list[str]:
    """The articles of a part, each with its title and its line breaks."""
    text = read_utf8(text_file(folder, part), "--data")
    return [article for article in text.split("\n\n") if article.strip()]


def prepare(options: argparse.Namespace) -> None:
    """Train the tokenizer on the training text and write both parts as uint16.

    The validation text holds a quarter of a million tokens; the last articles of the training text
    (they are shuffled) fill it up to `VALID_TOKENS`, and nothing is trained on those.
    """
    from tokenizers import ByteLevelBPETokenizer

    train, valid = articles(options.data, "train"), articles(options.data, "valid")
    # More than will be missing; what is left over of it goes back to training.
    kept = int(len(train) * 0.92)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        train[:kept], vocab_size=options.vocabulary, special_tokens=["[MASK]"], show_progress=False
    )

    def encoded(texts: list[str]) -> list[np.ndarray]:
        found = tokenizer.encode_batch([f"{text}\n\n" for text in texts])
        return [np.array(one.ids, dtype=np.uint16) for one in found]

    held_out, spare = encoded(valid), encoded(train[kept:])
    while sum(map(len, held_out)) < VALID_TOKENS and spare:
        held_out.append(spare.pop())
    pieces = encoded(train[:kept])
    kept_tokens = sum(map(len, pieces))
    parts = {"train": pieces + spare, "valid": held_out}
    options.out.mkdir(parents=True, exist_ok=True)
    for part, pieces in parts.items():
        np.save(options.out / f"{part}.npy", np.concatenate(pieces))
    tokenizer.save_model(str(options.out))
    about = {
        "vocabulary": tokenizer.get_vocab_size(),
        "tokens": {part: sum(map(len, pieces)) for part, pieces in parts.items()},
        "articles": {part: len(pieces) for part, pieces in parts.items()},
        "train_bytes_per_token": len("".join(train[:kept]).encode()) / kept_tokens,
    }
    write_atomically(options.out / "about.json", compact_json(about))
    print(compact_json(about), end="")


def load_tokens(folder: Path, part: str, device: str) -> torch.Tensor:
    path = folder / f"{part}.npy"
    try:
        tokens = np.load(path, allow_pickle=False)
    # Damage shows as whatever the first broken byte leads to.
    except Exception as error:
        raise InvalidInputError(
            f"{str(path)!r} cannot be read: {first_line(error)}; run prepare again."
        ) from error
    return torch.from_numpy(tokens.astype(np.int64)).to(device)


def masked(windows: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Ids with masks, the masked places and what stood there.

    The same number in every sequence, so that no shape depends on the draw; a masked token is
    always the mask, never a random one.
    """
    count = round(SHARE_MASKED * windows.shape[1])
    draw = torch.rand(windows.shape, generator=generator, device=generator.device)
    places = draw.topk(count, dim=1).indices.to(windows.device)
    return windows.scatter(1, places, MASK), places, windows.gather(1, places)


def training_batches(cell: KeysCell, tokens: torch.Tensor):
    """Windows from anywhere in the text, without end; only the seed decides which."""
    generator = torch.Generator(tokens.device).manual_seed(cell.seed)
    length = cell.sizes.length
    reach = torch.arange(length, device=tokens.device)
    shape = (cell.batch_tokens // length, 1)
    while True:
        starts = torch.randint(
            len(tokens) - length, shape, generator=generator, device=tokens.device
        )
        yield masked(tokens[starts + reach], generator)


def validation_batches(cell: KeysCell, tokens: torch.Tensor):
    """The same windows and masks for every variant and seed; batches as large as in training."""
    generator = torch.Generator().manual_seed(0)
    shape = (cell.batch_tokens // cell.sizes.length, cell.sizes.length)
    size = shape[0] * shape[1]
    for place in range(0, min(len(tokens), cell.valid_tokens) // size * size, size):
        yield masked(tokens[place : place + size].view(shape), generator)
