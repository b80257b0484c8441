"""One token into a summary, and its queries' answer: `fused_decode` and its operator.

Dimension legend: B batch, H query heads, SH summary heads, D head width, E value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.kernels.launching.kernel_arguments import tensor_or_number
from lln.kernels.launching.operators import operator
from lln.tracing import is_watched


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
