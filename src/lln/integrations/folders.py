"""Checkpoint folders: load a model as it was saved, write a converted one beside it.

Nothing here reaches the network: a folder that is not there is an error, not a download.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lln.errors import CalibrationWarning, InvalidInputError
from lln.files import check_apart, check_folder, check_free, new_folder, read_lines
from lln.integrations.conversion_report import Conversion
from lln.integrations.convert import convert
from lln.integrations.transformers import register, transformers
from lln.integrations.work_folder import check_unlocked

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Written by save_pretrained; everything else in a folder is copied as it is.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json", ".h5", ".msgpack", ".onnx")
_KEPT = "is left as it is"
_TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")


def convert_folder(
    source: Path,
    target: Path,
    *,
    attention: str,
    layers: str | None,
    calibrate: Path | None,
    samples: int,
    tokens: int,
    overwrite: bool,
    echo: Callable[[str], None],
    **options: Any,
) -> None:
    """``lln convert``: load, convert, save.

    Args:
        source: A checkpoint folder.
        target: Where to write the converted one.
        attention: ``"lln"``, ``"lln_diag"`` or ``"lln_keys"``.
        layers: Numbers or names, separated by commas; None = all.
        calibrate: A text file, or a folder of them, to find α and β on.
        samples: Lines of it to use.
        tokens: Longest sample.
        overwrite: Whether ``target`` may exist.
        echo: Prints a line.
        **options: As in `lln.integrations.convert.convert`.
    """
    _check_places(source, target, overwrite)
    lines = None if calibrate is None else read_lines(calibrate, "--calibrate")
    model = load_model(source)
    batch = None if lines is None else text_batch(source, lines[:samples], tokens)
    report = _convert(model, attention, layers=parse_layers(layers), calibrate=batch, **options)
    echo(report.render(shutil.get_terminal_size((100, 24)).columns))
    if batch is None:
        echo("measured on random inputs; with --calibrate text.txt, on your text.")
    with new_folder(target, overwrite, "NEW_FOLDER") as folder:
        model.save_pretrained(folder)
        copy_companions(source, folder)
    echo(
        f"wrote {target}; load it with from_pretrained after "
        "lln.integrations.transformers.register()."
    )


def recover_folder(
    source: Path,
    target: Path,
    *,
    attention: str,
    layers: str | None,
    text: Path,
    tokens: int,
    work: Path | None,
    overwrite: bool,
    echo: Callable[[str], None],
    training: dict[str, Any],
    **options: Any,
) -> None:
    """``lln recover``: load, convert, train to imitate the original, save.

    Args:
        source: A checkpoint folder with softmax attention.
        target: Where to write the recovered model.
        attention: ``"lln"``, ``"lln_diag"`` or ``"lln_keys"``.
        layers: Numbers or names, separated by commas; None = all.
        text: To train on.
        tokens: Length of a training sample.
        work: For checkpoints; None = beside ``target``.
        overwrite: Whether ``target`` may exist.
        echo: Prints a line.
        training: As in `lln.integrations.recover.recover`.
        **options: As in `lln.integrations.convert.convert`.
    """
    from lln.integrations.recover import recover

    _check_places(source, target, overwrite)
    if work is None:
        # ``.`` and ``..`` have no name to lengthen.
        named = target if target.name.strip(".") else target.resolve()
        work = named.with_name(f"{named.name}.work")
    # Of several processes that torchrun starts, one speaks and writes.
    speaks = int(os.environ.get("RANK", "0")) == 0
    say = echo if speaks else (lambda line: None)
    check_apart(source, work, "--work", _KEPT)
    check_apart(work, target, "NEW_FOLDER", "holds the checkpoints")
    check_folder(work, "--work")
    check_unlocked(work)
    lines = read_lines(text, "--text")
    model = load_model(source)
    pieces = Pieces(source, lines, tokens)
    calibration = {
        name: torch.stack([pieces[index][name] for index in range(min(len(pieces), 16))])
        for name in pieces[0]
    }
    conversion = _convert(
        model, attention, layers=parse_layers(layers), calibrate=calibration, **options
    )

    def tell(checkpoint: Path | None) -> None:
        say(conversion.render(shutil.get_terminal_size((100, 24)).columns))
        samples = f"{len(pieces)} sample{'s' * (len(pieces) != 1)} of {tokens} tokens at most"
        begin = "where it resumes" if checkpoint is None else f"going on from {checkpoint}"
        say(f"{samples}; checkpoints in {work}, {begin}.")

    report = recover(model, pieces, output_dir=work, probe=calibration, on_start=tell, **training)
    if speaks:
        with new_folder(target, overwrite, "NEW_FOLDER") as folder:
            model.save_pretrained(folder)
            copy_companions(source, folder)
    after = report.before if report.after is None else report.after
    say(
        f"output differs from softmax by {report.before:.1%} after conversion, {after:.1%} after "
        f"recovery; wrote {target}."
    )


def _convert(model: PreTrainedModel, attention: str, **options: Any) -> Conversion:
    """Convert, and leave what it warns of to the table that the commands print."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        return convert(model, attention, **options)


def _check_places(source: Path, target: Path, overwrite: bool) -> None:
    """Before anything is loaded: the source is kept, and the target can be written."""
    check_apart(source, target, "NEW_FOLDER", _KEPT)
    check_free(target, overwrite, "NEW_FOLDER")


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
            if sum(map(len, piece)) >= 6 * self.tokens:
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


def load_model(source: Path, **options: Any) -> PreTrainedModel:
    """The model of a checkpoint folder, of the class it was saved as, in eval mode."""
    register()
    # Here, because without transformers safetensors is missing too, and `register` has said so.
    from lln.integrations.loading import LOADING_ERRORS, why_not_loaded

    if not (source / "config.json").is_file():
        raise InvalidInputError(
            f"{str(source)!r} is no checkpoint folder: it has no config.json; nothing is "
            "downloaded, so give the folder of a model saved with save_pretrained."
        )
    try:
        return _load(source, options).eval()
    except LOADING_ERRORS as error:
        raise InvalidInputError(
            f"{str(source)!r} cannot be loaded: {why_not_loaded(source, error)}"
        ) from error


def _load(source: Path, options: dict[str, Any]) -> PreTrainedModel:
    config = transformers.AutoConfig.from_pretrained(source, local_files_only=True)
    names = getattr(config, "architectures", None) or []
    default = transformers.AutoModel
    kind = getattr(transformers, names[0], default) if names else default
    return kind.from_pretrained(source, local_files_only=True, **options)


def load_tokenizer(source: Path) -> Any:
    """The tokenizer of a checkpoint folder, able to pad."""
    # Without files transformers would make up a tokenizer that knows no word.
    if not any((source / name).is_file() for name in _TOKENIZERS):
        raise InvalidInputError(
            f"{str(source)!r} has no tokenizer to read the text with; put its files "
            "(tokenizer.json) there, or convert in Python with calibrate=batch."
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, local_files_only=True)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


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


def copy_companions(source: Path, target: Path) -> None:
    """Copy what is neither weights nor already there: tokenizer, processor, pooling, card."""
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_file() and not path.name.endswith(_WEIGHTS) and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, place)
