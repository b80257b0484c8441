"""The masks of our attention functions: the model's 2-D padding mask, sliced, and nothing N×N.

Hugging Face calls the mask function before the layers run and hands its result to every attention
call. Without one it would hand over None and padding would be attended in silence. Ours only
slices: no value is looked at, so that ``torch.compile(fullgraph=True)`` and ``torch.export`` pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from lln.errors import InvalidInputError

_UNKNOWN_PATTERN = (
    "LLN attention cannot apply this model's pattern of masked pairs in linear time; give a 2-D "
    "attention_mask (under torch.compile and torch.export always, ones will do), or cu_seq_lens_q "
    "and cu_seq_lens_k for packed sequences."
)


def slicing_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
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
        **kwargs: ``use_vmap``, True for patterns of the model's own; the rest is not needed.

    Returns:
        None: every key counts; bool ``[B, S]``: those that do; int64 ``[B, T]``: the number of the
        packed sequence every token belongs to.
    """
    if isinstance(q_offset, Tensor):
        raise InvalidInputError(
            "a static cache keeps keys of a fixed length, most of them empty, which LLN attention "
            "would have to read anew for every token; use lln.integrations.cache.LLNCache, whose "
            "size is fixed too."
        )
    if kwargs.get("use_vmap"):
        raise InvalidInputError(_UNKNOWN_PATTERN)
    if mask_function in (causal_mask_function, bidirectional_mask_function):
        return _sliced(attention_mask, kv_length)
    parts = _conjunction(mask_function)
    numbers = _closure(parts[1]).get("packed_sequence_mask") if parts else None
    if isinstance(numbers, Tensor) and attention_mask is None:
        if torch.compiler.is_compiling():
            # A trace always sees packing here, whatever the positions are.
            raise InvalidInputError(_UNKNOWN_PATTERN)
        if parts[0] is causal_mask_function or "sliding_window" in _window(parts[0]):
            return numbers.long()
    if "sliding_window" in _window(mask_function):
        # The layer knows its window, and refuses or applies it.
        return _sliced(attention_mask, kv_length)
    raise InvalidInputError(_UNKNOWN_PATTERN)


def check_mask(mask: object) -> Tensor | None:
    """Refuse masks that are not ours."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        seen = f"{mask.dim()}-D" if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidInputError(
            f"attention_mask is {seen}: LLN attention never forms the N×N scores that such a mask "
            "belongs to; pass a 2-D [B, S] padding mask."
        )
    return mask


def is_packed(mask: Tensor | None) -> bool:
    """Whether a mask numbers packed sequences."""
    return mask is not None and mask.dtype == torch.int64


def _sliced(attention_mask: Tensor | None, kv_length: int) -> Tensor | None:
    return None if attention_mask is None else attention_mask[:, -kv_length:]


def _conjunction(function: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """The two patterns joined by ``and_masks``, or nothing.

    Hugging Face keeps the patterns, and the numbers of packed sequences that it found by their
    position_ids, in closures.
    """
    parts = _closure(function).get("mask_functions", ())
    return parts if function.__name__ == "and_mask" and len(parts) == 2 else ()


def _window(function: Callable[..., Any]) -> dict[str, Any]:
    """The settings of a pattern that is a window around the diagonal."""
    parts = _conjunction(function)
    plain = parts and parts[1] in (causal_mask_function, bidirectional_mask_function)
    return _closure(parts[0]) if plain else {}


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
