"""A Hugging Face text model that is already on this machine; nothing is ever downloaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from lln.errors import InvalidInputError
from lln.integrations.loading import DATA_ONLY, check_files, loading
from lln.integrations.transformers import register


@dataclass(frozen=True)
class LocalModel:
    """A model in evaluation mode and its tokenizer.

    Attributes:
        name: What to call it, without the place it was loaded from.
        model: The model, float32.
        tokenizer: Its tokenizer.
    """

    name: str
    model: Any
    tokenizer: Any

    @property
    def architecture(self) -> str:
        """Name of the model's class."""
        return type(self.model).__name__

    @property
    def longest(self) -> int | None:
        """Most tokens the model takes; None if its configuration does not say."""
        limit = getattr(self.model.config, "max_position_embeddings", None)
        # RoBERTa counts positions from its padding index, which uses some up.
        offset = getattr(self.model.config, "pad_token_id", None) or 0
        is_offset = "roberta" in str(getattr(self.model.config, "model_type", ""))
        if not isinstance(limit, int) or limit < 1:
            return None
        return limit - offset - 1 if is_offset else limit

    def encode(self, text: str, tokens: int, samples: int) -> Tensor:
        """Consecutive pieces of a text as token ids, int64 ``[samples, tokens]`` at most.

        Fewer pieces, or one shorter piece, where the text ends.
        """
        every = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        frame = self.tokenizer("", verbose=False)["input_ids"]
        # What the tokenizer puts around a text: all but the last before it, the last after it.
        before, after = (frame[:-1], frame[-1:]) if len(frame) > 1 else (frame, [])
        room = max(tokens - len(frame), 1)
        pieces = [every[start : start + room] for start in range(0, samples * room, room)]
        pieces = [piece for piece in pieces if len(piece) == room] or [every[:room]]
        return torch.tensor([[*before, *piece, *after] for piece in pieces], dtype=torch.int64)

    @torch.no_grad()
    def run(self, tokens: Tensor) -> None:
        """One forward pass over ``[B, T]``."""
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if getattr(self.model.config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = tokens
        self.model(**inputs)


def load_local_model(model: str) -> LocalModel:
    """Load a model from a folder, or by its hub name from this machine's cache.

    Args:
        model: A folder with ``config.json`` and weights, or a name such as ``org/model``.

    Raises:
        InvalidInputError: One sentence with what to do, if it cannot be used.
    """
    folder = Path(model).expanduser()
    if folder.is_file():
        raise InvalidInputError(
            f"{model!r} is a file; name the folder with the model's config.json and weights."
        )
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise InvalidInputError(
            f"the folder {model!r} has no config.json, so there is no model in it; name the folder "
            "that save_pretrained wrote."
        )
    if not folder.exists() and _is_path(model):
        raise InvalidInputError(
            f"the folder {model!r} does not exist; name a folder with a model, or a hub name such "
            "as org/model."
        )
    place = str(folder) if folder.is_dir() else model
    # A model that was converted names our attention.
    register()
    with _quiet():
        if folder.is_dir():
            check_files(folder)
        elif not _is_cached(model):
            raise InvalidInputError(
                f"{model!r} is neither a folder nor a model in this machine's Hugging Face cache, "
                f"and inspect downloads nothing; fetch it first with `hf download {model}`, or "
                "name a folder."
            )
        with loading(folder, f"the model in {model!r} cannot be loaded"):
            loaded = AutoModel.from_pretrained(place, dtype=torch.float32, **DATA_ONLY)
        inputs = getattr(loaded, "main_input_name", "input_ids")
        if inputs != "input_ids":
            raise InvalidInputError(
                f"{type(loaded).__name__} takes {inputs}, and inspect reads text; measure it from "
                "Python with lln.instruments.capture around its forward."
            )
        with loading(
            folder,
            f"{model!r} has a model, but its tokenizer cannot be loaded; put the tokenizer's "
            "files beside the model",
        ):
            tokenizer = AutoTokenizer.from_pretrained(place, **DATA_ONLY)
            # Some damage shows only at the first word that it does not know.
            tokenizer("Log-normal.", verbose=False)
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        # The library makes such a tokenizer where the files are missing.
        raise InvalidInputError(
            f"{model!r} has a model but no vocabulary; put the tokenizer's files (tokenizer.json) "
            "beside the model."
        )
    name = "/".join(folder.resolve().parts[-2:]) if folder.is_dir() else model
    return LocalModel(name, loaded.eval(), tokenizer)


def _is_path(model: str) -> bool:
    """Whether a name cannot be meant as ``model`` or ``org/model``."""
    return model.startswith((".", "/", "~", "\\")) or model.count("/") > 1 or ":" in model


def _is_cached(model: str) -> bool:
    try:
        return isinstance(try_to_load_from_cache(model, "config.json"), str)
    except ValueError:
        return False


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's progress bars and notes while loading."""
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
