"""The attention of a model whose tokens lie on several ranks.

`lln.integrations.context_parallel.connect` leaves the ranks at the modules of a model, because a
module is there whenever its attention runs: also when activation checkpointing runs it again in the
backward pass.

Dimension legend: B batch, H query heads, T this rank's tokens, E value width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lln.eager.dropout import drop_keys
from lln.errors import InvalidInputError
from lln.integrations.attached import KeptSoftmax, attached_to
from lln.integrations.attention_call import AttentionCall

# The name under which a module of a connected model keeps its `lln.parallel.ranks.Ranks`.
RANKS = "lln_ranks"


def ranks_of(module: nn.Module) -> Any:
    """The ranks that share this module's tokens; None = this process has all of them."""
    return vars(module).get(RANKS)  # `getattr` of a module takes microseconds to find nothing


def attend_sharded(call: AttentionCall, *, past: bool, weights: bool) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks: ``[B, H, T, E]``.

    Args:
        call: With this rank's tokens.
        past: Whether the call continues a cache.
        weights: Whether the attention weights were asked for.
    """
    _refuse(call, past, weights)
    # Loaded here, because most models never need torch.distributed.
    from lln import parallel

    group = ranks_of(call.module).group()
    shared = {"group": group, "key_mask": call.mask, **call.how()}
    if call.attention == "lln_keys":
        value = drop_keys(call.value, call.dropout_p)
        return parallel.lln_keys_attention(
            call.query, call.key, value, **call.key_options(), **shared
        )
    sides = (call.query, call.key, call.value)
    shared |= {
        "dropout_p": call.dropout_p,
        "matching": call.settings.criterion(call.attention),
    }
    # What a sample's own statistics would be here, this rank's tokens alone, is not what counts.
    matches = call.settings.statistics == "sample" and not call.is_causal
    alpha, beta = (None, None) if matches else call.temperatures()
    shared |= {"alpha": alpha, "beta": beta}
    if call.attention == "lln":
        return parallel.lln_attention(*sides, **shared)
    blocks = {"mix": call.mix(), "block_size": call.block_size}
    return parallel.lln_diag_attention(*sides, **blocks, **shared)


def _refuse(call: AttentionCall, past: bool, weights: bool) -> None:
    """One sentence on what has no parallel form, with what to do instead."""
    name = type(call.module).__name__
    settings, heads = call.settings, call.heads
    if call.window is not None or isinstance(attached_to(call.module), KeptSoftmax):
        problem = f"{name} has softmax attention or a sliding window"
        fix = "convert all of its layers to LLN attention"
    elif call.has_pages:
        problem = f"{name} sees pages, which have no parallel form"
        fix = "convert a causal model to 'lln' or 'lln_diag', others with pages=0"
    elif call.cu_seqlens is not None:
        problem, fix = "the sequences of the batch are packed", "pad them, one sequence per row"
    elif past:
        problem, fix = "the call continues a cache", "run the model with use_cache=False"
    elif weights:
        problem, fix = "output_attentions=True asks for N×N weights", "leave it out"
    elif heads is not None and settings.statistics == "running" and heads.training:
        problem = "statistics='running' would average over this rank's tokens alone in training"
        fix = "convert with statistics='fixed', 'learned' or 'sample', or call model.eval()"
    elif heads is not None and call.attention == "lln_diag" and heads.join in ("scale", "heads"):
        problem = f"mix={heads.join!r} has no parallel form"
        fix = "convert with mix='ratio', 'gate' or a number"
    elif heads is not None and heads.convolution is not None:
        problem = "convolution needs neighbours that another rank has"
        fix = "convert without it"
    else:
        return
    raise InvalidInputError(f"a model on several ranks cannot run here: {problem}; {fix}.")
