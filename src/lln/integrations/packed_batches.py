"""Packed batches: several sequences in one row, told apart by boundaries or numbers.

Dimension legend: B batch, H query heads, T tokens, D head width, E value width, n sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lln.eager.dropout import drop_keys
from lln.errors import InvalidInputError
from lln.functional.packed import lln_attention_varlen, lln_diag_attention_varlen
from lln.integrations.masks import is_packed
from lln.tracing import values_are_readable

if TYPE_CHECKING:
    from lln.integrations.attend import Call


def boundaries(kwargs: dict[str, Any], mask: Tensor | None, query: Tensor) -> Tensor | None:
    """``cu_seqlens [n + 1]`` over all B·T tokens, as given or from numbered tokens; None if dense.

    Args:
        kwargs: Of the attention call; may hold ``cu_seq_lens_q`` and ``cu_seq_lens_k``.
        mask: As `lln.integrations.masks.slicing_mask` returns it.
        query: ``[B, H, T, D]``.
    """
    given, of_keys = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if given is None and of_keys is not None:
        raise InvalidInputError("cu_seq_lens_k came without cu_seq_lens_q; pass both, equal.")
    if given is not None:
        if of_keys is not None and of_keys is not given and _differ(given, of_keys):
            raise InvalidInputError(
                "cu_seq_lens_q and cu_seq_lens_k must be equal: packed sequences attend to "
                "themselves."
            )
        if mask is not None and not is_packed(mask):
            raise InvalidInputError(
                "attention_mask and cu_seq_lens_q cannot be combined: packed sequences carry no "
                "padding; leave attention_mask out."
            )
        return given
    if mask is None or not is_packed(mask):
        return None
    # A sequence never goes on into the next row of the batch.
    begins = torch.ones_like(mask, dtype=torch.bool)
    begins[:, 1:] = mask[:, 1:] != mask[:, :-1]
    starts = begins.flatten().nonzero().squeeze(-1)
    return torch.cat([starts, starts.new_tensor([mask.numel()])])


def _differ(one: Tensor, two: Tensor) -> bool:
    """Whether the shapes differ, or the values where looking at them costs no wait."""
    if one.shape != two.shape:
        return True
    if not (values_are_readable(one) and values_are_readable(two)):
        return False
    return bool((one != two).any())


def numbered(cu_seqlens: Tensor, query: Tensor) -> Tensor:
    """The number of the sequence that every token belongs to, int64 ``[B, T]``."""
    batch, _, tokens, _ = query.shape
    place = torch.arange(batch * tokens, device=query.device)
    bounds = cu_seqlens[1:].to(place.dtype).contiguous()
    return torch.searchsorted(bounds, place, right=True).view(batch, tokens)


def attend_packed(call: Call, cu_seqlens: Tensor) -> Tensor:
    """LLN or LLN + Diag attention inside each packed sequence: ``[B, H, T, E]``."""
    from lln.integrations.attend import mix_of

    batch, _, tokens, _ = call.query.shape
    query, key, value = (
        tensor.transpose(1, 2).flatten(0, 1) for tensor in (call.query, call.key, call.value)
    )
    alpha, beta = _temperatures(call, cu_seqlens)
    options: dict[str, Any] = {
        "alpha": alpha,
        "beta": beta,
        "matching": call.settings.matching,
        "is_causal": call.is_causal,
        "enable_gqa": True,
        "impl": call.settings.impl,
    }

    def dense(packed: Tensor) -> Tensor:
        return packed.unflatten(0, (batch, tokens)).transpose(1, 2)

    if call.attention == "lln":
        out = lln_attention_varlen(
            query, key, value, cu_seqlens, dropout_p=call.dropout_p, **options
        )
        return dense(out)
    mix = mix_of(call)
    if call.heads is not None and call.heads.join in ("scale", "heads"):
        value = drop_keys(value.transpose(0, 1), call.dropout_p).transpose(0, 1)
        long = lln_attention_varlen(query, key, value, cu_seqlens, **options)
        short = lln_diag_attention_varlen(
            query, key, value, cu_seqlens, mix=0.0, block_size=call.block_size, **options
        )
        return call.heads.combine(dense(long), dense(short), mix)
    if isinstance(mix, Tensor):
        shape = (batch, call.query.shape[1], tokens, mix.shape[-1])
        mix = mix.expand(shape).transpose(1, 2).flatten(0, 1)
    out = lln_diag_attention_varlen(
        query,
        key,
        value,
        cu_seqlens,
        mix=mix,
        block_size=call.block_size,
        dropout_p=call.dropout_p,
        **options,
    )
    return dense(out)


def _temperatures(
    call: Call, cu_seqlens: Tensor
) -> tuple[float | Tensor | None, float | Tensor | None]:
    """α, β for all sequences; running and sample statistics see each as a sample of its own."""
    from lln.integrations.attend import temperatures

    if call.heads is None:
        return temperatures(call)
    if call.settings.statistics == "sample":
        return None, None
    sides = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (call.query, call.key, call.value)]
    lengths = cu_seqlens.diff()
    if call.settings.statistics == "running" and call.heads.training:
        token_mask = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
        padded = [side.new_zeros(*token_mask.shape, *side.shape[1:]) for side in sides]
        for dense, side in zip(padded, sides, strict=True):
            dense[token_mask] = side.detach()
        sides = [dense.transpose(1, 2) for dense in padded]
        return call.heads.temperatures(sides[0], sides[1], sides[2], token_mask, call.is_causal)
    return call.heads.temperatures(call.query, call.key, call.value, None, call.is_causal)
