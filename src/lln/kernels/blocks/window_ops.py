"""Attention inside a sliding window: `fused_window`, its operators and its gradients.

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
    "float scale, bool causal"
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
) -> tuple[Tensor, Tensor, Tensor]:
    launches = _launches()
    found: tuple[Tensor, Tensor, Tensor] = launches.window_gradients(
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
) -> Tensor:
    """Softmax inside a sliding window: ``[B, H, T, E]`` in the dtype of query.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, T, D]``.
        value: ``[B, Hk, T, E]``.
        key_mask: bool ``[B, T]`` or None.
        places: int32 ``[T]``, where the tokens of packed sequences stand
            (`lln.eager.band.places_of`); None = one behind the other.
        window: How many tokens a row sees before its own, and behind it unless ``is_causal``.
        scale: Factor of the scores.
        is_causal: Whether a row sees only its own and earlier tokens.
    """
    query, key, value = within_reach(query), within_reach(key), within_reach(value)
    rest = (key_mask, places, window, scale, is_causal)
    # In slices, because an output channel depends only on the same channel of the values.
    parts = value.split(MAX_WIDTH, -1) if value.shape[-1] > MAX_WIDTH else (value,)
    made = [call(_OPERATION, attend_window, query, key, part, *rest) for part in parts]
    return made[0] if len(made) == 1 else torch.cat(made, -1)
