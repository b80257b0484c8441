"""Checkpoint folders: what `lln convert` does with them; other commands share it.

Nothing here reaches the network: a folder that is not there is an error, not a download.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lln.checks.reading import each_line
from lln.errors import CalibrationWarning, InvalidInputError
from lln.files import check_apart, check_free, new_folder
from lln.integrations.conversion_report import Conversion
from lln.integrations.convert import convert
from lln.integrations.loading import load_model, load_tokenizer, loading
from lln.integrations.searches import REPORT_FILE, load_search
from lln.integrations.trial_batch import example_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Written by save_pretrained; everything else in a folder is copied as it is.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json", ".h5", ".msgpack", ".onnx")
KEPT = "is left as it is"
# Per token: a text of so many surely fills it.
_CHARACTERS = 6


def convert_folder(
    source: Path,
    target: Path,
    *,
    attention: str,
    layers: str | None,
    calibrate: Path | None,
    target_quality: float | None = None,
    holdout: Path | None = None,
    samples: int,
    tokens: int,
    overwrite: bool,
    echo: Callable[[str], None],
    **options: Any,
) -> None:
    """``lln convert``: load, convert, save.

    `lln.cli.model_commands` says what the arguments are; ``echo`` prints a line, and options go to
    `lln.integrations.convert.convert`.
    """
    check_places(source, target, overwrite)
    if target_quality is not None:
        # Before the weights are loaded, which can take long.
        load_search()
    lines, unseen = (
        None if path is None else list(_enough(each_line(path, name), samples, tokens))
        for path, name in ((calibrate, "--calibrate"), (holdout, "--holdout"))
    )
    model = load_model(source)
    held = None
    if lines is None:
        batch = None
    elif attention == "lln_keys":
        # In a single line block and keys often cover everything.
        pieces = Pieces(source, lines, tokens)
        if target_quality is None or unseen is not None:
            batch = pieces.batch(0, samples)
        else:
            batch, held = divided(pieces, samples)
    else:
        batch = text_batch(source, lines[:samples], tokens)
    if unseen is not None:
        held = Pieces(source, unseen, tokens).batch(0, samples)
    if target_quality is not None and batch is not None and torch.cuda.is_available():
        nn.Module.to(model, "cuda")
        batch, held = _on(model, batch), None if held is None else _on(model, held)
    check_runs(source, model, batch)
    options |= {"layers": parse_layers(layers), "target": target_quality}
    report = convert_quietly(model, attention, calibrate=batch, holdout=held, **options)
    echo(report.render(shutil.get_terminal_size((100, 24)).columns))
    if batch is None:
        echo("measured on random inputs; with --calibrate text.txt, on your text.")
    if target_quality is not None and held is None:
        echo("nothing was held out: --calibrate has text for fewer than 4 samples.")
    with new_folder(target, overwrite, "NEW_FOLDER") as folder:
        save_converted(model, report, source, folder)
    echo(
        f"wrote {target}; load it with from_pretrained after "
        "lln.integrations.transformers.register()."
    )


def save_converted(model: PreTrainedModel, report: Conversion, source: Path, folder: Path) -> None:
    """Write a converted model, what its target found, and what lay beside the original."""
    model.save_pretrained(folder)
    if report.target is not None:
        report.target.write(folder / REPORT_FILE)
    copy_companions(source, folder)


def divided(pieces: Pieces, samples: int) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """The first samples, and the last quarter of them apart; None if they are fewer than four."""
    count = min(samples, len(pieces))
    held = count // 4
    return pieces.batch(0, count - held), pieces.batch(count - held, count) if held else None


def _on(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(model.device) for name, tensor in batch.items()}


def convert_quietly(model: PreTrainedModel, attention: str, **options: Any) -> Conversion:
    """Convert, and leave what it warns of to the table that the commands print."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        return convert(model, attention, **options)


def check_places(source: Path, target: Path, overwrite: bool) -> None:
    """Before anything is loaded: the source is kept and can be copied, the target be written."""
    check_apart(source, target, "NEW_FOLDER", KEPT)
    check_free(target, overwrite, "NEW_FOLDER")
    companions(source)


def check_runs(source: Path, model: PreTrainedModel, batch: dict[str, Tensor] | None) -> None:
    """Refuse a model that cannot run as it is: then its files are damaged, not our attention."""
    if batch is None:
        few = example_inputs(model)
    else:
        known, ids = model.get_input_embeddings(), batch.get("input_ids")
        most = getattr(known, "num_embeddings", None)
        if ids is not None and most is not None and ids.max() >= most:
            raise InvalidInputError(
                f"the tokenizer of {str(source)!r} gives token {int(ids.max())}, and its model "
                f"knows {most} tokens; put the tokenizer there that the model was trained with."
            )
        few = {name: tensor[:1, :8] for name, tensor in batch.items()}
    with loading(source, f"the model in {str(source)!r} cannot be run"), torch.no_grad():
        model(**few)


def _enough(lines: Iterable[str], samples: int, tokens: int) -> Iterator[str]:
    """As many lines as `Pieces` of so many tokens need, or a sample per line; the rest is left."""
    filled = 0
    for line in lines:
        yield line
        filled += len(line)
        if filled >= _CHARACTERS * tokens:
            samples, filled = samples - 1, 0
        if samples == 0:
            return


class Pieces(Dataset[dict[str, Tensor]]):
    """Pieces of a text, each of one length in tokens, tokenised when they are asked for."""

    def __init__(self, source: Path, lines: list[str], tokens: int) -> None:
        """Join lines until a piece surely fills its tokens.

        Args:
            source: Folder with the tokenizer.
            lines: Of the text.
            tokens: Length of a piece, special tokens included.
        """
        self.tokenizer = load_tokenizer(source)
        self.tokens = min(tokens, self.tokenizer.model_max_length)
        self.texts: list[str] = []
        piece: list[str] = []
        for line in lines:
            piece.append(line)
            if sum(map(len, piece)) >= _CHARACTERS * self.tokens:
                self.texts.append(" ".join(piece))
                piece = []
        if piece and not self.texts:
            self.texts.append(" ".join(piece))
        if not self.texts:
            raise InvalidInputError("there is no text to train on: every line is empty.")

    def __len__(self) -> int:
        """How many there are."""
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """The model's inputs, without a batch dimension."""
        encoded = self.tokenizer(
            self.texts[index],
            truncation=True,
            max_length=self.tokens,
            padding="max_length",
            return_tensors="pt",
        )
        return {name: tensor[0] for name, tensor in encoded.items()}

    def batch(self, start: int, stop: int) -> dict[str, Tensor]:
        """Those from ``start`` to ``stop``, or to the last, as one batch."""
        found = [self[index] for index in range(start, min(stop, len(self)))]
        return {name: torch.stack([piece[name] for piece in found]) for name in found[0]}


def text_batch(source: Path, lines: list[str], tokens: int) -> dict[str, Tensor]:
    """Tokens of the lines, padded, cut to ``tokens``."""
    if not lines:
        raise InvalidInputError("there is no text to calibrate on: every line is empty.")
    tokenizer = load_tokenizer(source)
    tokens = min(tokens, tokenizer.model_max_length)
    batch = tokenizer(lines, padding=True, truncation=True, max_length=tokens, return_tensors="pt")
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


def parse_layers(layers: str | None) -> list[int | str] | None:
    """``"0,2,encoder.layer.3"`` → numbers and names."""
    if layers is None:
        return None
    parts = [part.strip() for part in layers.split(",") if part.strip()]
    return [int(part) if part.isdecimal() else part for part in parts]


def companions(source: Path) -> list[Path]:
    """The files that a conversion does not write: tokenizer, processor, pooling, card.

    Raises:
        InvalidInputError: If one is a link to a file elsewhere, which a folder from somebody else
            could use to have any file of this machine copied.
    """
    home = source.resolve()
    # In Hugging Face's cache the files of a model are links: from snapshots/REVISION to blobs.
    caches = [up.parent for up in home.parents if up.name == "snapshots"]
    inside = [home, *(cache / "blobs" for cache in caches)]
    found = []
    for path in sorted(source.rglob("*")):
        if path.name.endswith(_WEIGHTS) or path.name == REPORT_FILE or not path.is_file():
            continue
        place = path.resolve()
        if not any(folder in place.parents for folder in inside):
            raise InvalidInputError(
                f"{str(path)!r} is a link to {str(place)!r}, outside the folder, and is not "
                "copied; put the file itself there, or remove the link."
            )
        found.append(path)
    return found


def copy_companions(source: Path, target: Path) -> None:
    """Copy them, where there is no file of that name yet."""
    for path in companions(source):
        place = target / path.relative_to(source)
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, place)
