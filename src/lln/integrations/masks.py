"""The masks of our attention functions: the model's 2-D padding mask, sliced, and nothing N×N.

Hugging Face calls the mask function before the layers run and hands its result to every attention
call. Without one it would hand over None, and padding would be attended to silently. Ours slices
the padding mask; its values are read on a CPU only, and never where ``torch.compile`` or
``torch.export`` trace the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lln.errors import InvalidInputError
from lln.integrations import unavailable
from lln.integrations.mask_probes import UNKNOWN_PATTERN, packed_sequences
from lln.tracing import has_values, is_compiling, values_are_readable

try:
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
except ImportError as error:
    raise unavailable(error) from error


def slicing_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """What attention needs to know of the mask.

    Args:
        batch_size: B.
        q_length: T.
        kv_length: S.
        q_offset: Position of the first query.
        kv_offset: Position of the first key.
        mask_function: The pattern Hugging Face would apply to pairs of positions.
        attention_mask: bool ``[B, S]``, True = attend.
        device: Where the result belongs.
        **kwargs: ``config``; ``local_size``, the width of a window; ``use_vmap``, True for patterns
            of the model's own; the rest is not needed.

    Returns:
        None: every key counts; bool ``[B, S]``: those that do; int64 ``[B, T]``: the number of the
        packed sequence every token belongs to.
    """
    # A static cache tells the position by a tensor, but only once it was written to.
    if isinstance(q_offset, Tensor) or (
        mask_function is not bidirectional_mask_function
        and q_offset + q_length != kv_offset + kv_length
    ):
        raise InvalidInputError(
            f"{q_length} tokens came with {kv_length} keys that do not end at the last token: a "
            "static cache keeps keys of a fixed length, most of them empty, which LLN attention "
            "would have to read anew for every token; leave cache_implementation out, or pass "
            "past_key_values=lln.integrations.cache.LLNCache(model)."
        )
    if mask_function in (causal_mask_function, bidirectional_mask_function):
        return _sliced(attention_mask, kv_length)
    if kwargs.get("use_vmap") or getattr(mask_function, "__name__", None) != "and_mask":
        raise InvalidInputError(UNKNOWN_PATTERN)
    config = kwargs.get("config")
    window = kwargs.get("local_size")
    if window is not None and getattr(config, "attention_chunk_size", None) is not None:
        raise InvalidInputError(UNKNOWN_PATTERN)
    if is_compiling() or not (attention_mask is None or has_values(attention_mask)):
        # A trace cannot ask the pattern, which without a mask may be of packed sequences.
        if attention_mask is None or window is None:
            raise InvalidInputError(UNKNOWN_PATTERN)
        return _sliced(attention_mask, kv_length)
    queries = range(q_offset, q_offset + q_length)
    keys = range(kv_offset, kv_offset + kv_length)
    numbers = packed_sequences(mask_function, batch_size, queries, keys, window)
    if numbers is None:
        # The layer knows its window, and refuses or applies it.
        return _sliced(attention_mask, kv_length)
    if attention_mask is not None:
        raise InvalidInputError(UNKNOWN_PATTERN)
    return numbers.to(device)


def _sliced(attention_mask: Tensor | None, kv_length: int) -> Tensor | None:
    if attention_mask is None:
        return None
    mask = attention_mask[:, -kv_length:]
    # Every layer would look at keys of which none is hidden.
    return None if values_are_readable(mask) and bool(mask.all()) else mask
