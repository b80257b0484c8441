"""The masks of our attention functions: the model's 2-D padding mask, sliced, and nothing N×N.

Hugging Face calls the mask function before the layers run and hands its result to every attention
call. Without one it would hand over None, and padding would be attended to silently. Ours only
slices: it reads no value, so that ``torch.compile(fullgraph=True)`` and ``torch.export`` pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lln.errors import InvalidInputError
from lln.integrations import unavailable
from lln.tracing import is_compiling

try:
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
except ImportError as error:
    raise unavailable(error) from error

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
        **kwargs: ``config``; ``local_size``, the width of a window; ``use_vmap``, True for patterns
            of the model's own; the rest is not needed.

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
    if mask_function in (causal_mask_function, bidirectional_mask_function):
        return _sliced(attention_mask, kv_length)
    if kwargs.get("use_vmap") or mask_function.__name__ != "and_mask":
        raise InvalidInputError(_UNKNOWN_PATTERN)
    config = kwargs.get("config")
    window = kwargs.get("local_size")
    if window is not None and getattr(config, "attention_chunk_size", None) is not None:
        raise InvalidInputError(_UNKNOWN_PATTERN)
    if attention_mask is None:
        # Without a mask the pattern may be of packed sequences, and in a trace always is.
        if is_compiling():
            raise InvalidInputError(_UNKNOWN_PATTERN)
        numbers = _packed_sequences(mask_function)
        if numbers is not None:
            return numbers
    if window is not None:
        # The layer knows its window, and refuses or applies it.
        return _sliced(attention_mask, kv_length)
    raise InvalidInputError(_UNKNOWN_PATTERN)


def _sliced(attention_mask: Tensor | None, kv_length: int) -> Tensor | None:
    return None if attention_mask is None else attention_mask[:, -kv_length:]


def _packed_sequences(mask_function: Callable[..., Any]) -> Tensor | None:
    """The numbers of packed sequences, int64 ``[B, T]``, if there are any.

    Hugging Face finds packing by the position_ids and makes ``and_masks(pattern, packed)``, whose
    closures hold the numbers.
    """
    numbers = _closure(_closure(mask_function)["mask_functions"][-1]).get("packed_sequence_mask")
    return numbers.long() if isinstance(numbers, Tensor) else None


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
