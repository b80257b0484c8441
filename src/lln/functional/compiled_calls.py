"""Which calls the compiled passes of a CPU compute, and why no others; for the plan of a call."""

from __future__ import annotations

import torch
from torch import Tensor

from lln.cpu import compiled_passes, library
from lln.cpu.compiled_passes import GROUP
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
    """Why compiled passes do not compute LLN attention of a call; None if they do."""
    query, key, value, mask = *call.qkv, call.key_mask
    numbers = (call.alpha, call.beta)
    reason = why_absent(query, key, value, *numbers, mask, call.bounds)
    if reason is not None:
        return reason
    if call.kind not in ("lln", "lln_diag"):
        return "computes lln_attention and lln_diag_attention only"
    if accumulation_dtype(query.dtype) != torch.float32:
        return f"computes in float32, not {query.dtype}"
    if query.shape[-1] % GROUP or value.shape[-1] % GROUP:
        widths = f"{query.shape[-1]} and {value.shape[-1]}"
        return f"takes widths that are multiples of {GROUP}, not {widths}"
    if any(isinstance(side, Tensor) and side.requires_grad for side in numbers):
        return "computes no gradients of alpha and beta"
    if call.is_causal:
        return None if mask is None else "takes no key_mask in causal calls"
    if query.shape[1] != key.shape[1]:
        return "takes as many key heads as query heads"
    if mask is not None and not bool(mask.any(-1).all()):
        return "needs a key to attend to in every sample"
    return None


def why_blocks_apart(call: Call) -> str | None:
    """Why PyTorch computes the blocks of a call whose LLN attention is compiled; None if not so."""
    if not call.block_size:
        return None
    if call.is_causal:
        return "has no passes for causal blocks"
    if isinstance(call.mix, Tensor):
        return "takes a mix that is one number"
    if call.block_size % GROUP:
        return f"takes a block_size that is a multiple of {GROUP}, not {call.block_size}"
    return None


def employs_threads(call: Call) -> bool:
    """Whether most threads get a head at a time: packed sequences are computed in turn."""
    samples = call.query.shape[0] if call.bounds is None else 1
    return compiled_passes.employs_threads(samples * call.query.shape[1])
