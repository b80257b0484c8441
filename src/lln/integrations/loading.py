"""Loading checkpoints: what is damaged is said in one sentence, whichever library failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lln.checks.reading import first_line, read_json
from lln.errors import InvalidInputError
from lln.integrations.settings import Settings, check_layers
from lln.integrations.transformers import register, transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Left to itself, transformers asks in the terminal whether to run the code in a folder.
DATA_ONLY: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")
_SAVE_AGAIN = "save the model again with model.save_pretrained(folder)"
_CONFIG = {"model_type?": (str, None), "architectures?": ([str], None), "lln?": (dict, None)}
# Bytes of a configuration; the names of 20,000 classes take two million. transformers takes seconds
# to print a longer one, which it always does.
_MOST_CONFIG = 5_000_000


def load_model(source: Path, **options: Any) -> PreTrainedModel:
    """The model of a checkpoint folder, of the class it was saved as, in eval mode."""
    register()
    if not (source / "config.json").is_file():
        raise InvalidInputError(
            f"{str(source)!r} is no checkpoint folder: it has no config.json; nothing is "
            "downloaded, so give the folder of a model saved with save_pretrained."
        )
    check_files(source)
    with loading(source, f"{str(source)!r} cannot be loaded"):
        config = transformers.AutoConfig.from_pretrained(source, **DATA_ONLY)
        kind = _class_of(config)
        return kind.from_pretrained(source, **DATA_ONLY, **options).eval()


def _class_of(config: Any) -> Any:
    """The class that a model was saved as; the bare model if its configuration names none."""
    names = getattr(config, "architectures", None)
    if not names:
        return transformers.AutoModel
    kind = getattr(transformers, names[0], None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise InvalidInputError(
            f"config.json names the class {names[0][:80]!r}, which is no model of transformers "
            f"{transformers.__version__}; load it in Python and call "
            "lln.integrations.convert.convert(model)."
        )
    return kind


def load_tokenizer(source: Path) -> Any:
    """The tokenizer of a checkpoint folder, able to pad."""
    # Without files transformers would make up a tokenizer that knows no word.
    if not any((source / name).is_file() for name in _TOKENIZERS):
        raise InvalidInputError(
            f"{str(source)!r} has no tokenizer to read the text with; put its files "
            "(tokenizer.json) there, or convert in Python with calibrate=batch."
        )
    with loading(source, f"the tokenizer of {str(source)!r} cannot be loaded"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **DATA_ONLY)
        # Some damage shows only at the first word that it does not know.
        tokenizer("Log-normal.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@contextmanager
def loading(folder: Path, failed: str) -> Iterator[None]:
    """Turn whatever goes wrong in the body into one sentence.

    Args:
        folder: Of the checkpoint.
        failed: How the sentence begins, such as ``"'model' cannot be loaded"``.
    """
    try:
        yield
    # Damage shows as whatever the first broken byte leads to, in any of four libraries.
    except Exception as error:
        raise InvalidInputError(f"{failed}: {_why(folder, error)}") from error


def check_files(folder: Path) -> None:
    """Refuse a checkpoint whose configuration or index cannot be used, before it is loaded."""
    path = folder / "config.json"
    found = read_json(path, _CONFIG, "a configuration of a model", _SAVE_AGAIN, _MOST_CONFIG)
    try:
        check_layers(Settings.of(SimpleNamespace(**found)).layers)
    except InvalidInputError as error:
        raise InvalidInputError(f"{str(path)!r} cannot be used: {error}") from error
    for index in sorted(folder.glob("*.index.json")):
        indexed_files(index, _SAVE_AGAIN)


def indexed_files(index: Path, fix: str) -> set[str]:
    """The names of the files that an index of weights lists: they lie beside it.

    ``fix`` says what to do if the index cannot be used.
    """
    found: Any = read_json(index, {"weight_map": {str: str}}, "an index of weights", fix)
    names = set(found["weight_map"].values())
    for name in sorted(names):
        inside = Path(name).name == name and "\\" not in name
        if not inside or not (index.parent / name).is_file():
            where = "which is not beside it" if inside else "which is no name of a file beside it"
            raise InvalidInputError(f"{str(index)!r} lists {name[:200]!r}, {where}; {fix}.")
    return names


def _why(folder: Path, error: Exception) -> str:
    """The reason, as the end of a sentence."""
    if isinstance(error, (UnpicklingError, EOFError)):
        pickled = sorted(folder.glob("*.bin"))
        name = pickled[0].name if pickled else "its file"
        return (
            f"{name} is a pickle that is broken or holds more than tensors, which could run any "
            "program and is not opened; where you trust it, load it and save the model again with "
            "model.save_pretrained(folder), which writes model.safetensors."
        )
    return first_line(error) + "."
