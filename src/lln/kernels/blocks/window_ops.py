"""Attention inside a window or inside blocks, tile by tile: operators and gradients.

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

_WINDOW = (
    "Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor? places, int window, "
    "bool blocks, float scale, bool causal"
)


@cache
def _launches() -> Any:
    """The module that imports Triton."""
    from lln.kernels.blocks import launch_window

    return launch_window


def _attend(*inputs: Any) -> tuple[Tensor, Tensor]:
    launches = _launches()
    found: tuple[Tensor, Tensor] = launches.attend_window(launches.WindowCall(*inputs))
    return found


def _gradients(
    gradients: Sequence[Tensor], inputs: Sequence[Any], kept: Sequence[Tensor], *_: Any
) -> tuple[Tensor, ...]:
    launches = _launches()
    found: tuple[Tensor, ...] = launches.window_gradients(
        launches.WindowCall(*inputs), *kept, within_reach(gradients[0])
    )
    return found


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    norm = query.new_empty(query.shape[:3], dtype=torch.float32)
    return output_like(query, value.shape[-1]), norm


# Kept: the output, and the logarithm of every row's normaliser.
_OPERATION = Operation(
    5, _attend, _gradients, of=(0, 1, 2), kept=slice(0, 2), alike=lambda *_: (0, 1, 2)
)
attend_window = with_gradients("attend_window", _WINDOW, _OPERATION, _fake, results=2)


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
    query, key, value = within_reach(query), within_reach(key), within_reach(value)
    rest = (key_mask, places, window, blocks, scale, is_causal)
    # In slices, because an output channel depends only on the same channel of the values.
    parts = value.split(MAX_WIDTH, -1) if value.shape[-1] > MAX_WIDTH else (value,)
    made = [call(_OPERATION, attend_window, query, key, part, *rest) for part in parts]
    return made[0] if len(made) == 1 else torch.cat(made, -1)


def add_blocks(tensors: Sequence[Tensor], numbers: Sequence[Any], out: Tensor, mix: float) -> None:
    """Make of ``out`` mix · out + (1 − mix) · blocks.

    ``tensors`` are query, key and value, ``numbers`` block size, scale, and whether it is causal.
    """
    _launches().attend_window(_blocks(tensors, numbers), out, mix)


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
    own = _launches().attend_window(call)
    _launches().window_gradients(call, *own, within_reach(gradient), made, mix)


def _blocks(tensors: Sequence[Tensor], numbers: Sequence[Any]) -> Any:
    block_size, *rest = numbers
    return _launches().WindowCall(*tensors, None, None, block_size, True, *rest)
