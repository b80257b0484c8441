"""Blocks that fit a tile, alone: `fused_blocks`, its operators and its gradients.

Dimension legend: B batch, H query heads, Hk key heads, T tokens, D head width, E value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lln.kernels.launching.operators import Operation, call, with_gradients
from lln.kernels.launching.shapes import output_like, within_reach

_BLOCKS = (
    "Tensor query, Tensor key, Tensor value, Tensor? key_mask, int block_size, float scale, "
    "bool causal"
)


@cache
def _launches() -> Any:
    """The module that imports Triton."""
    from lln.kernels.blocks import launch_blocks

    return launch_blocks


def _attend(*inputs: Any) -> Tensor:
    launches = _launches()
    found: Tensor = launches.attend_whole_blocks(launches.BlockCall(*inputs))
    return found


def _gradients(
    gradients: Sequence[Tensor], inputs: Sequence[Any], *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    launches = _launches()
    call = launches.BlockCall(*inputs)
    found: tuple[Tensor, Tensor, Tensor] = launches.whole_blocks_gradients(
        call, within_reach(gradients[0])
    )
    return found


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return output_like(query, value.shape[-1])


# The backward recomputes the softmax rows.
_OPERATION = Operation(4, _attend, _gradients, of=(0, 1, 2), alike=lambda *_: (0, 1, 2))
attend_blocks = with_gradients("attend_blocks", _BLOCKS, _OPERATION, _fake)


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
    query, key, value = within_reach(query), within_reach(key), within_reach(value)
    rest = (key_mask, block_size, scale, is_causal)
    if value.shape[-1] <= value_width:
        return call(_OPERATION, attend_blocks, query, key, value, *rest)
    # In slices, because an output channel depends only on the same channel of the values.
    parts = value.split(value_width, -1)
    made = [call(_OPERATION, attend_blocks, query, key, part, *rest) for part in parts]
    return torch.cat(made, -1)
