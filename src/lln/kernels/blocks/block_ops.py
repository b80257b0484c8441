"""Attention to near tokens, inside blocks or a window: operators and gradients.

*Whole* blocks fit a tile, and stand alone; others, and windows, are gone over tile by tile.

Dimension legend: B batch, H query heads, Hk key heads, T tokens, D head width, E value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lln.kernels.launching.limits import MAX_WIDTH
from lln.kernels.launching.operators import Operation, call, with_gradients
from lln.kernels.launching.shapes import output_like, within_reach

_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? key_mask"


@cache
def _launches() -> tuple[Any, Any]:
    """The modules that import Triton: of whole blocks, and of windows."""
    from lln.kernels.blocks import launch_blocks, launch_window

    return launch_blocks, launch_window


def _attend_whole(*inputs: Any) -> Tensor:
    whole, _ = _launches()
    return whole.attend_whole_blocks(whole.BlockCall(*inputs))


def _gradients_of_whole(
    gradients: Sequence[Tensor], inputs: Sequence[Any], *_: Any
) -> tuple[Tensor, ...]:
    whole, _ = _launches()
    return whole.whole_blocks_gradients(whole.BlockCall(*inputs), within_reach(gradients[0]))


def _fake_whole(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return output_like(query, value.shape[-1])


# The backward recomputes the softmax rows.
_WHOLE = Operation(4, _attend_whole, _gradients_of_whole, of=(0, 1, 2), alike=lambda *_: (0, 1, 2))
attend_blocks = with_gradients(
    "attend_blocks", f"{_INPUTS}, int block_size, float scale, bool causal", _WHOLE, _fake_whole
)


def _attend(*inputs: Any) -> tuple[Tensor, Tensor]:
    _, windows = _launches()
    return windows.attend_window(windows.WindowCall(*inputs))


def _gradients(
    gradients: Sequence[Tensor], inputs: Sequence[Any], kept: Sequence[Tensor], *_: Any
) -> tuple[Tensor, ...]:
    _, windows = _launches()
    window = windows.WindowCall(*inputs)
    return windows.window_gradients(window, *kept, within_reach(gradients[0]))


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    norm = query.new_empty(query.shape[:3], dtype=torch.float32)
    return output_like(query, value.shape[-1]), norm


# Kept: the output, and the logarithm of every row's normaliser.
_WINDOW = Operation(
    5, _attend, _gradients, of=(0, 1, 2), kept=slice(0, 2), alike=lambda *_: (0, 1, 2)
)
_NUMBERS = "Tensor? places, int window, bool blocks, float scale, bool causal"
attend_window = with_gradients("attend_window", f"{_INPUTS}, {_NUMBERS}", _WINDOW, _fake, results=2)


def fused_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None,
    block_size: int,
    scale: float,
    is_causal: bool,
    value_width: int,
) -> Tensor:
    """Block-diagonal attention by its own kernel: ``[B, H, T, E]`` in the dtype of query.

    The arguments are those of a `lln.kernels.blocks.launch_blocks.BlockCall`, and how many channels
    of the values a launch takes.
    """
    rest = (key_mask, block_size, scale, is_causal)
    return _in_slices(_WHOLE, attend_blocks, (query, key, value), rest, value_width)


def fused_window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None,
    places: Tensor | None,
    window: int,
    scale: float,
    is_causal: bool,
    blocks: bool = False,
) -> Tensor:
    """Softmax inside a sliding window, or blocks: ``[B, H, T, E]`` in the dtype of query.

    The arguments are those of a `lln.kernels.blocks.launch_window.WindowCall`.
    """
    rest = (key_mask, places, window, blocks, scale, is_causal)
    return _in_slices(_WINDOW, attend_window, (query, key, value), rest, MAX_WIDTH)


def _in_slices(
    operation: Operation, registered: Any, sides: Sequence[Tensor], rest: Sequence[Any], width: int
) -> Tensor:
    """An output channel depends only on the same channel of the values."""
    query, key, value = (within_reach(side) for side in sides)
    parts = value.split(width, -1) if value.shape[-1] > width else (value,)
    made = [call(operation, registered, query, key, part, *rest) for part in parts]
    return made[0] if len(made) == 1 else torch.cat(made, -1)


def add_blocks(tensors: Sequence[Tensor], numbers: Sequence[Any], out: Tensor, mix: float) -> None:
    """Make of ``out`` mix · out + (1 − mix) · blocks.

    ``tensors`` are query, key and value, ``numbers`` block size, scale, and whether it is causal.
    """
    _launches()[1].attend_window(_blocks(tensors, numbers), out, mix)


def add_block_gradients(
    gradient: Tensor,
    tensors: Sequence[Tensor],
    numbers: Sequence[Any],
    made: tuple[Tensor, ...],
    mix: float,
) -> None:
    """The same with ``made``, the gradients of query, key and value."""
    call = _blocks(tensors, numbers)
    # The blocks' own output is not what was kept.
    _, windows = _launches()
    own = windows.attend_window(call)
    windows.window_gradients(call, *own, within_reach(gradient), made, mix)


def _blocks(tensors: Sequence[Tensor], numbers: Sequence[Any]) -> Any:
    block_size, *rest = numbers
    return _launches()[1].WindowCall(*tensors, None, None, block_size, True, *rest)
