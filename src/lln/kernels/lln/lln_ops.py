"""The fused kernels as PyTorch operators: schemas, fakes and gradients.

`run` decides whether a call needs them. Triton is imported when a kernel first runs, never here.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width,
E value width, SH summary heads (H if β differs within a group of query heads, else Hk), n packed
sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lln.kernels.launching.operators import Operation, operator, with_gradients
from lln.kernels.launching.shapes import output_like, summary_heads, within_reach

if TYPE_CHECKING:
    from lln.kernels.summaries.lln_call import Gradients

# The arguments of every operator. Those of a call are the fields of `lln_call.Call`.
_INPUTS = "Tensor query, Tensor key, Tensor value"
_CALL_TENSORS = (
    f"{_INPUTS}, Tensor? alpha, Tensor? beta, Tensor? key_mask, Tensor? mix, Tensor? bounds"
)
_CALL_NUMBERS = (
    "float alpha_number, float beta_number, float mix_number, int block_size, float scale, "
    "float dropout_p, int seed, bool causal, int longest"
)
TENSORS = _CALL_TENSORS.count(",") + 1


@cache
def _launches() -> tuple[Any, Any, Any]:
    """The launch modules (causal and bidirectional) and `LLNCall`; imported when first needed."""
    from lln.kernels.causal import launch_causal
    from lln.kernels.lln import launch_bidirectional
    from lln.kernels.summaries.lln_call import LLNCall

    return launch_causal, launch_bidirectional, LLNCall


def forward(
    arguments: tuple[Any, ...], save: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output, and with ``save`` the summary, for the arguments of `attend_lln`.

    It is written to ``out``; None = a new tensor.
    """
    causal, other, kind = _launches()
    call = kind(*arguments)
    attend = causal.attend_causal if call.causal else other.attend_bidirectional
    return attend(call, save, out)


def gradients(
    gradient: Tensor,
    arguments: tuple[Any, ...],
    log_mass: Tensor | None,
    centroid: Tensor | None,
    asked: tuple[bool, bool, bool],
    dv: Tensor | None = None,
) -> Gradients:
    """Gradients of query, key, value, and of alpha, beta, mix where they are needed.

    ``dv`` is where to write the values' gradient, unless query heads that share values have to be
    summed first; None = a new tensor.
    """
    causal, other, kind = _launches()
    call = kind(*arguments)
    launch = causal.causal_gradients if call.causal else other.bidirectional_gradients
    return launch(call, within_reach(gradient), log_mass, centroid, asked, dv)


def _attend(*inputs: Any) -> Tensor:
    return forward(inputs, save=False)[0]


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return output_like(query, value.shape[-1])


# LLN attention (with the diagonal part if block_size > 0), saving nothing for a backward.
attend_lln = operator("attend", f"{_CALL_TENSORS}, {_CALL_NUMBERS}", _attend, _fake)


def _attend_saving(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The same, with the summary: log-mass ``[B, SH, D]`` and centroid ``[B, SH, D, E]``.

    A causal call has no such summary: both are empty.
    """
    out, log_mass, centroid = forward(inputs, save=True)
    if log_mass is None or centroid is None:
        log_mass, centroid = _empty_summary(*inputs, samples=0)
    return out, log_mass, centroid


def _fake_saving(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, _, value, *_, bounds = inputs[:TENSORS]
    samples = query.shape[0] if bounds is None else bounds.shape[0] - 1
    summary = _empty_summary(*inputs, samples=0 if _is_causal(inputs) else samples)
    return output_like(query, value.shape[-1]), *summary


def _empty_summary(
    query: Tensor, key: Tensor, value: Tensor, _: Any, beta: Tensor | None, *__: Any, samples: int
) -> tuple[Tensor, Tensor]:
    shape = (samples, summary_heads(query, key, beta), query.shape[-1])
    log_mass = query.new_empty(shape, dtype=torch.float32)
    return log_mass, value.new_empty((*shape, value.shape[-1]))


def _gradients(
    found: Sequence[Tensor], inputs: Sequence[Any], summary: Sequence[Tensor], asked: Any
) -> Gradients:
    log_mass, centroid = summary
    return gradients(found[0], tuple(inputs), log_mass, centroid, tuple(asked))


def _alike(inputs: Sequence[Any], summary: Sequence[Any]) -> tuple[int, ...]:
    """Query, and keys and values where every key head has one summary."""
    query, key = inputs[:2]
    slots = query.shape[1] if _is_causal(inputs) else summary[0].shape[1]
    return (0, 1, 2) if slots == key.shape[1] else (0,)


def _is_causal(inputs: Sequence[Any]) -> bool:
    return inputs[-2]


_SAVING = Operation(
    TENSORS, _attend_saving, _gradients, of=(*range(5), 6), on_demand=(3, 4, 6), kept=slice(1, 3),
    alike=_alike,
)  # fmt: skip
attend_saving = with_gradients(
    "attend_saving", f"{_CALL_TENSORS}, {_CALL_NUMBERS}", _SAVING, _fake_saving, results=3,
    backward_name="attend_backward",
)  # fmt: skip
# Ordinary calls need no tensor in place of a summary that there is not.
ORDINARY = _SAVING._replace(launch=lambda *inputs: forward(inputs, save=True))
