"""Hugging Face models whose tokens are divided between ranks.

    connect(model)                                # its attention now runs over all ranks' tokens
    shard = shard_batch(model, batch)             # this rank's tokens and their positions
    loss = loss_sum(model(**shard)) / tokens_of_all_ranks
    loss.backward()
    lln.parallel.sum_gradients(model)             # every rank now has the gradients of one process

Everything in such a model but attention works on single tokens, so attention is all that has to
know. What a model does with single tokens or whole sequences outside its layers (a pooler, a head
that classifies sequences) is not known here: heads that are known to do so are refused.

Dimension legend: B batch, T tokens of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lln import checks
from lln.errors import InvalidInputError, UnsupportedModelError
from lln.integrations.settings import ATTENTIONS
from lln.integrations.sharded_call import RANKS
from lln.integrations.transformers import register
from lln.parallel.ranks import find_ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Heads that read one token or compare tokens with each other.
_WHOLE_SEQUENCE = (
    "ForSequenceClassification",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
    "ForPreTraining",
    "ForQuestionAnswering",
)


def connect(model: PreTrainedModel, group: Any = None) -> None:
    """Let the attention of a model run over the tokens of all ranks, until `disconnect`.

    Args:
        model: With LLN attention in all layers; the same on every rank.
        group: A process group, or one axis of a ``DeviceMesh``; None = all processes.

    Raises:
        InvalidInputError: If the model does not have LLN attention, or there is no such group.
        UnsupportedModelError: If the model has a head that needs the whole sequence.
    """
    name = type(model).__name__
    found = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if found not in ATTENTIONS:
        raise InvalidInputError(
            f"connect takes a model with LLN attention, got {name} with {found!r}; call "
            "lln.integrations.convert.convert(model) first."
        )
    if name.endswith(_WHOLE_SEQUENCE):
        raise UnsupportedModelError(
            f"the head of {name} needs tokens that lie on other ranks; connect model.base_model "
            "and bring together what the head reads yourself."
        )
    ranks = find_ranks(group, "connect")
    # A model that another process sent comes without the names of our attention.
    register()
    for module in model.modules():
        setattr(module, RANKS, ranks)


def disconnect(model: nn.Module) -> None:
    """Let the attention of a model run over this process's tokens alone again."""
    for module in model.modules():
        if hasattr(module, RANKS):
            delattr(module, RANKS)


def shard_batch(
    model: PreTrainedModel,
    batch: Mapping[str, Tensor],
    group: Any = None,
    *,
    multiple_of: int = 64,
) -> dict[str, Tensor]:
    """This rank's tokens of a batch that every rank has, with their positions in the sequence.

    Args:
        model: Whose inputs they are: models of the RoBERTa family count positions from the padding.
        batch: ``input_ids`` and whatever else has ``[B, T]`` entries, such as ``attention_mask``
            and ``labels``. Positions are added unless there are ``position_ids``.
        group: As in `connect`.
        multiple_of: Shards begin at multiples of so many tokens; with the ``block_size`` of
            ``"lln_diag"`` and ``"lln_keys"`` no block crosses ranks.

    Returns:
        The batch of this rank.
    """
    ranks = find_ranks(group, "shard_batch")
    checks.check_count("multiple_of", multiple_of)
    if "input_ids" not in batch:
        raise InvalidInputError("shard_batch needs input_ids, to count the tokens by.")
    tokens = batch["input_ids"].shape[1]
    for name, entry in batch.items():
        if not isinstance(entry, Tensor) or entry.dim() < 2 or entry.shape[1] != tokens:
            seen = list(entry.shape) if isinstance(entry, Tensor) else type(entry).__name__
            raise InvalidInputError(
                f"{name} must have an entry for each of the {tokens} tokens of every sample, got "
                f"{seen}; leave it out of the batch that is cut."
            )
    if "labels" in batch and getattr(model, "loss_type", None) == "ForCausalLM":
        raise InvalidInputError(
            "the labels of a causal model belong to the token before, which may lie on another "
            "rank; leave labels out of the batch, shift them, and cut them as an entry 'targets'."
        )
    whole = dict(batch)
    if "position_ids" not in whole:
        whole["position_ids"] = _positions(model, batch["input_ids"])
    pieces = -(-tokens // multiple_of)
    if pieces < ranks.size:
        raise InvalidInputError(
            f"{tokens} tokens in pieces of {multiple_of} do not suffice for {ranks.size} ranks; "
            "use longer sequences, fewer ranks or a smaller multiple_of."
        )
    # The first token of this rank, and that of the next one.
    start, end = (
        min(pieces * rank // ranks.size * multiple_of, tokens)
        for rank in (ranks.own, ranks.own + 1)
    )
    # Models view labels as one row, which a slice does not allow.
    return {name: entry[:, start:end].contiguous() for name, entry in whole.items()}


def _positions(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Positions ``[B, T]`` as the model itself would count them."""
    for module in model.modules():
        count = getattr(module, "create_position_ids_from_input_ids", None)
        padding = getattr(module, "padding_idx", None)
        if callable(count) and isinstance(padding, int):
            found = count(input_ids, padding)
            assert isinstance(found, Tensor)
            return found
    numbers = torch.arange(input_ids.shape[1], device=input_ids.device)
    return numbers.expand(input_ids.shape)
