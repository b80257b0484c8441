"""The halves of LLN attention with gradients: `fused_summary`, `fused_read`; and `fused_decode`.

Wide values go in slices. A call without tokens is the caller's to answer.

Dimension legend: B batch, H query heads, Hk key heads, SH summary heads, T queries, S keys, D head
width, E value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lln.kernels.launching.kernel_arguments import tensor_or_number
from lln.kernels.launching.operators import Operation, call, operator, with_gradients
from lln.kernels.launching.shapes import output_like, within_reach
from lln.tracing import is_watched

_KEYS = "Tensor key, Tensor value, Tensor? beta, Tensor? key_mask, float beta_number"
_QUERIES = (
    "Tensor query, Tensor? alpha, Tensor log_mass, Tensor centroid, Tensor? mask, "
    "float alpha_number"
)


def fused_summary(
    key: Tensor,
    value: Tensor,
    beta: float | Tensor,
    key_mask: Tensor | None,
    value_width: int,
) -> tuple[Tensor, Tensor]:
    """Log-mass ``[B, SH, D]`` and centroid ``[B, SH, D, E]`` of the keys, in float32.

    β is a number or a tensor for 1, Hk or H heads; a launch takes ``value_width`` channels.
    """
    key, value = within_reach(key), within_reach(value)
    beta_t, number = tensor_or_number(beta, key.shape[1])
    parts = [
        call(_SUMMARISE, summarise, key, part, beta_t, key_mask, number)
        for part in value.split(value_width, -1)
    ]
    return parts[0][0], torch.cat([part[1] for part in parts], -1)


def fused_read(
    query: Tensor,
    alpha: float | Tensor,
    log_mass: Tensor,
    centroid: Tensor,
    mask: Tensor | None,
    value_width: int,
) -> Tensor:
    """Every query's softmax over the slots, applied to the centroids: ``[B, H, T, E]``.

    α is a number or a tensor for 1 or H heads, and SH = H or a divisor of it. Where the mask bool
    ``[B, T]`` is False, whatever the query holds has no effect; None = all count.
    """
    query = within_reach(query)
    alpha_t, number = tensor_or_number(alpha, query.shape[1])
    parts = [
        call(_READ, read_summary, query, alpha_t, log_mass, part, mask, number)
        for part in centroid.split(value_width, -1)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


@cache
def _launches() -> Any:
    """Imported when first needed, because it imports Triton."""
    from lln.kernels.summaries import launch_summary

    return launch_summary


def _summarise(*inputs: Any) -> tuple[Tensor, Tensor]:
    return _launches().summarise(*inputs)


def _fake_summary(
    key: Tensor, value: Tensor, beta: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    heads = key.shape[1] if beta is None else beta.shape[1]
    shape = (key.shape[0], heads, key.shape[3])
    log_mass = key.new_empty(shape, dtype=torch.float32)
    return log_mass, log_mass.new_empty(*shape, value.shape[3])


def _gradients_of_summary(
    gradients: Sequence[Tensor], inputs: Sequence[Any], summary: Sequence[Tensor], asked: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    given = (side.contiguous() for side in gradients)
    return _launches().summarise_backward(*given, *summary, *inputs, *asked)


_SUMMARISE = Operation(
    4, _summarise, _gradients_of_summary, of=(0, 1, 2), on_demand=(2,), outputs=2, kept=slice(2)
)
summarise = with_gradients("summarise", _KEYS, _SUMMARISE, _fake_summary, results=2)


def _read(*inputs: Any) -> Tensor:
    return _launches().read(*inputs)


def _fake_read(query: Tensor, _: Any, __: Tensor, centroid: Tensor, *___: Any) -> Tensor:
    return output_like(query, centroid.shape[3])


def _gradients_of_read(
    gradients: Sequence[Tensor], inputs: Sequence[Any], _: Any, asked: Any
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    return _launches().read_backward(within_reach(gradients[0]), *inputs, *asked)


_READ = Operation(
    5, _read, _gradients_of_read, of=(0, 1, 2, 3), on_demand=(1,), alike=lambda *_: (0,)
)
read_summary = with_gradients("read_summary", _QUERIES, _READ, _fake_read)


def fused_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_mass: Tensor,
    centroid: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add one token to the summary and read it, by the kernel: output, log-mass, centroid."""
    alpha_t, alpha_number = tensor_or_number(alpha, query.shape[1])
    beta_t, beta_number = tensor_or_number(beta, log_mass.shape[1])
    launch = decode if is_watched(query) else append_and_read
    tensors = (query, key, value, log_mass, centroid, alpha_t, beta_t)
    return launch(*tensors, alpha_number, beta_number)


def append_and_read(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-mass and centroid after one token, from the arguments of `decode`."""
    from lln.kernels.summaries.launch_decode import decode as launch

    return launch(*arguments)


def _fake(
    query: Tensor, key: Tensor, value: Tensor, log_mass: Tensor, centroid: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    out = query.new_empty(*query.shape[:3], value.shape[3])
    return out, torch.empty_like(log_mass), torch.empty_like(centroid)


decode = operator(
    "decode",
    "Tensor query, Tensor key, Tensor value, Tensor log_mass, Tensor centroid, Tensor? alpha, "
    "Tensor? beta, float alpha_number, float beta_number",
    append_and_read,
    _fake,
    results=3,
)
