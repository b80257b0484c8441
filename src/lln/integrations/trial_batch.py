"""The batch that a model is run on while it is converted: checked, or made up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lln.errors import InvalidInputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENIZE = "tokenizer(texts, padding=True, return_tensors='pt')"


def check_inputs(name: str, inputs: Any, model: PreTrainedModel) -> dict[str, Tensor]:
    """The batch as a dictionary, or one sentence on how to make one."""
    if not isinstance(inputs, Mapping):
        raise InvalidInputError(
            f"{name} must be a dictionary of the model's inputs, as {_TOKENIZE} gives, got "
            f"{type(inputs).__name__}."
        )
    main = inputs.get(model.main_input_name)
    if isinstance(main, list):
        raise InvalidInputError(
            f"{name}[{model.main_input_name!r}] must be a tensor, got a list; tokenize with "
            f"{_TOKENIZE}."
        )
    # A model spread over several devices moves its inputs itself.
    spread = getattr(model, "hf_device_map", None) is not None
    if isinstance(main, Tensor) and main.device != model.device and not spread:
        raise InvalidInputError(
            f"{name} is on {main.device} and the model on {model.device}; pass "
            f"{name}=batch.to(model.device)."
        )
    if isinstance(main, Tensor):
        _check_size(name, main, inputs, model)
    elif not any(isinstance(value, Tensor) for value in inputs.values()):
        raise InvalidInputError(f"{name} has no tensors; give the model's inputs, as {_TOKENIZE}.")
    return dict(inputs)


def _check_size(name: str, main: Tensor, inputs: Mapping[str, Any], model: PreTrainedModel) -> None:
    """Refuse what the model cannot read: no tokens, or more than it has positions for."""
    if main.numel() == 0:
        raise InvalidInputError(
            f"{name}[{model.main_input_name!r}] is empty, of shape {list(main.shape)}; give at "
            "least one sample."
        )
    table = _positions_of(model)
    if table is None or main.dim() != 2 or main.is_floating_point() or "position_ids" in inputs:
        return
    tokens, room = main.shape[1], table.num_embeddings - getattr(table, "offset", 0)
    if table.padding_idx is not None:
        # RoBERTa and its like count from the padding on, and do not count padding.
        tokens = int(main.ne(table.padding_idx).sum(1).max())
        room = table.num_embeddings - table.padding_idx - 1
    if tokens > room:
        raise InvalidInputError(
            f"{name} has a sample of {tokens} tokens, and {type(model).__name__} has positions for "
            f"{room}; cut it with truncation=True, max_length={room}."
        )


def _positions_of(model: nn.Module) -> nn.Embedding | None:
    """A model's table of positions, of an encoder and a decoder the first; None if it has none."""
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and ("position" in name or name == "wpe"):
            return module
    return None


def example_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """A small batch that the model can run on, made up from its configuration."""
    config, device = model.config, model.device
    if model.main_input_name == "pixel_values" and getattr(config, "image_size", None):
        size = config.image_size
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        shape = (1, getattr(config, "num_channels", 3), height, width)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        return {"pixel_values": noise.to(device, model.dtype)}
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    if model.main_input_name != "input_ids" or not vocabulary:
        raise InvalidInputError(
            f"no example can be made up for {type(model).__name__}, whose main input is "
            f"{model.main_input_name!r}; call lln.integrations.convert.convert(model, "
            "batch=inputs), or with calibrate=inputs, with some of yours."
        )
    ids = torch.randint(vocabulary, (2, 32), generator=torch.Generator().manual_seed(0)).to(device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    return inputs
