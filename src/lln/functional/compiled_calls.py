"""Which calls the compiled passes of a CPU compute, and why no others; for the plan of a call."""

from __future__ import annotations

import torch

from lln.cpu import compiled_passes, library
from lln.functional.call import Call
from lln.precision import accumulation_dtype
from lln.tracing import is_untraced_on_cpu


def why_absent(*sides: object) -> str | None:
    """Why compiled passes compute nothing of these tensors, whatever the call; None if they can."""
    if not is_untraced_on_cpu(*sides):
        return "takes ordinary tensors on a CPU, outside compilers, transforms and dispatch modes"
    if library.load() is None:
        return f"has no compiled passes here: {library.why_not()}"
    return None


def why_unknown(call: Call) -> str | None:
    """Why compiled passes do not compute a call; None if they do."""
    sides = (*call.qkv, call.alpha, call.beta, call.key_mask, call.bounds, call.mix)
    reason = why_absent(*sides)
    if reason is not None:
        return reason
    if call.kind == "lln_keys":
        return "computes no exact keys"
    if accumulation_dtype(call.query.dtype) != torch.float32:
        return f"computes in float32, not {call.query.dtype}"
    return None


def employs_threads(call: Call) -> bool:
    """Whether most threads get a head at a time: packed sequences are computed in turn."""
    samples = call.query.shape[0] if call.bounds is None else 1
    return compiled_passes.employs_threads(samples * call.query.shape[1])
