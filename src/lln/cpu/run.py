"""Attention by the compiled passes: call for call what `lln.eager.run` computes with PyTorch.

Inputs are checked, and whoever calls knows that the passes compute the call
(`lln.functional.cpu_ways`). Arithmetic runs in float32; PyTorch computes second derivatives,
and heads of causal calls whose rows lose their digits.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width,
E value width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.checks.call import Call
from lln.cpu import compiled_passes
from lln.cpu.compiled_attention import attend_compiled, walk_compiled
from lln.cpu.compiled_matching import compiled_curves
from lln.cpu.compiled_passes import WINDOW_ROWS, Blocks, Exact, Pages, PassCall
from lln.eager import run as eager
from lln.eager.causal import GUARD
from lln.eager.causal_walk import Inputs
from lln.eager.dropout import drop_keys
from lln.eager.infinity import as_nan
from lln.eager.key_blocks import blocks_in


def attend_dense(call: Call) -> Tensor:
    """``[B, H, T, E]`` in the dtype of query.

    Args:
        call: A dense call of at least one number, without exact keys. α and β may be missing where
            it is not causal: the passes match them on the way.
    """
    query, key, value = eager.widen_inputs(*call.qkv, call.key_mask, call.dropout_p)
    is_wide = query is call.query and key is call.key and value is call.value
    # Keys have been dropped.
    wide = call if is_wide else call.replace(query=query, key=key, value=value, dropout_p=0.0)
    if call.kind == "lln":
        out = _long_range(wide)
    elif call.kind in ("diag", "window"):
        out = _short_range(wide)
    elif call.is_causal or isinstance(call.mix, Tensor) or _learn(call.alpha, call.beta):
        out = eager.join(_long_range(wide), _short_range(wide), call.mix)
    else:
        out = _attend(wide, Blocks(call.block_size, call.factor, float(call.mix)))
    return out if out.dtype == call.query.dtype else out.to(call.query.dtype)


def attend_keys(call: Call) -> Tensor:
    """``[B, H, T, E]`` of a dense call with exact keys, which are numbers or can be seen.

    It has at least one number and is not causal; α, β and the offset are known.
    """
    sides = eager.widen_inputs(*call.qkv, call.key_mask, 0.0)
    alpha, beta, offset = (
        number if _is_per_head(number, sides[0]) else _of_heads(sides[0], number)
        for number in (call.alpha, call.beta, call.offset)
    )
    numbers = (alpha, beta, offset)
    blocks = Blocks(call.block_size, call.factor, 0.0)
    by_torch = _by_torch(call, "query", "key", "value", "alpha", "beta", "offset", "keys")
    out = attend_compiled(sides, numbers, call.key_mask, blocks, by_torch, exact=_exact(call))
    return out.to(call.query.dtype)


def _by_torch(call: Call, *names: str) -> Callable[..., Tensor]:
    """Computes a call with other tensors, of which the first ones are named."""
    return lambda *given: eager.attend_dense(call.replace(**dict(zip(names, given, strict=False))))


def _is_per_head(number: Any, query: Tensor) -> bool:
    """Whether a temperature has an entry per query head; short calls feel what that spares."""
    return isinstance(number, Tensor) and number.dim() == 4 and number.shape[1] == query.shape[1]


def choose_keys(call: Call) -> Tensor:
    """The keys of a dense call by number: int64 ``[B, H, G, K]``."""
    query, key = call.query.to(torch.float32), call.key.to(torch.float32)
    blocks = Blocks(call.block_size, call.factor, 0.0)
    sides = PassCall(query, key, key, 1.0, 1.0, blocks, call.key_mask, _exact(call))
    return compiled_passes.choose(sides)


def attend_pages(call: Call) -> Tensor:
    """``[B, H, T, E]`` of a dense call with pages, which are chosen on the way or given."""
    return compiled_passes.forward_pages(_pages(call)).to(call.query.dtype)


def choose_pages(call: Call) -> Tensor:
    """The pages of a dense call by number: int64 ``[B, Hk, T, P]``."""
    found = compiled_passes.forward_pages(_pages(call), attends=False)
    return F.pad(found, (0, call.keys - found.shape[-1]), value=-1)


def _pages(call: Call) -> PassCall:
    keys, tokens = call.keys, call.key.shape[2]
    size, sinks, window = (min(one, tokens) for one in (call.page_size, call.sinks, call.window))
    keys = keys.long().contiguous() if isinstance(keys, Tensor) else min(keys, -(-tokens // size))
    is_chosen = call.choice_query is not None
    choice = (call.choice_query, call.choice_key) if is_chosen else (call.query, call.key)
    sides, dtype = [*call.qkv, *choice], torch.bfloat16
    if call.dropout_p or any(side.dtype != dtype for side in sides):
        dtype, sides = torch.float32, [side.to(torch.float32) for side in sides]
    query, key, value, choice_query, choice_key = sides
    query = eager.clean_queries(query, key, call.key_mask)
    value = drop_keys(value, call.dropout_p)
    blocks = Blocks(0, call.factor, None, call.is_causal, window)
    pages = Pages(keys, sinks, size, choice_query, choice_key, dtype)
    return PassCall(query, key, value, 1.0, 1.0, blocks, call.key_mask, None, pages)


def _exact(call: Call) -> Exact:
    tokens, keys = call.query.shape[2], call.keys
    blocks = blocks_in(tokens, call.block_size, call.key_mask is not None)
    groups = blocks * (call.block_size // call.group_size)
    keys = keys.contiguous() if isinstance(keys, Tensor) else min(keys, tokens)
    return Exact(keys, call.group_size, groups, dtype=call.query.dtype)


def _learn(*numbers: object) -> bool:
    """Whether one of the temperatures needs a gradient."""
    return torch.is_grad_enabled() and any(
        isinstance(number, Tensor) and number.requires_grad for number in numbers
    )


def _of_heads(query: Tensor, number: Any) -> Any:
    """A temperature per key head as one per query head."""
    return eager.repeat_temperature(number, query.shape[1], query.dtype)


def _long_range(call: Call) -> Tensor:
    """LLN attention of a call in float32."""
    query, key, value = call.qkv
    heads = query.shape[1]
    if _learn(call.alpha, call.beta):
        alpha, beta = _of_heads(query, call.alpha), _of_heads(query, call.beta)
        # Temperatures are multiplied in by autograd, which then knows their gradients.
        if call.key_mask is not None:
            key = torch.where(call.key_mask[:, None, :, None], key, 0.0)
        if isinstance(beta, Tensor) and beta.shape[1] > 1:
            key, value = eager.repeat_heads(key, heads), eager.repeat_heads(value, heads)
        call = call.replace(query=query * alpha, key=key * beta, value=value, alpha=1.0, beta=1.0)
    return _walk(call) if call.is_causal else _attend(call, None)


def _short_range(call: Call) -> Tensor:
    """Softmax inside blocks or windows, of a call in float32."""
    kind = "window" if call.kind == "window" else "diag"
    by_torch = _by_torch(call.replace(kind=kind), "query", "key", "value")
    query, key, value = call.qkv
    blocks = Blocks(call.block_size, call.factor, None, call.is_causal)
    if kind == "window":
        blocks = blocks._replace(size=WINDOW_ROWS, window=call.window)
    sides = (as_nan(query), as_nan(key), value)
    return attend_compiled(sides, (1.0, 1.0, 0.0), call.key_mask, blocks, by_torch)


def _attend(call: Call, blocks: Blocks | None) -> Tensor:
    """A call in float32 that is not causal: LLN alone, or mixed with blocks."""
    kind = "lln" if blocks is None else "lln_diag"
    by_torch = _by_torch(call.replace(kind=kind), "query", "key", "value", "alpha", "beta")
    query, numbers, curves = call.query, (call.alpha, call.beta), ()
    if call.alpha is None or call.beta is None:
        curves = compiled_curves(call.key, call.key_mask, call.matching)
    elif call.key.shape[1] != query.shape[1]:
        numbers = _of_heads(query, call.alpha), _of_heads(query, call.beta)
    return attend_compiled(call.qkv, (*numbers, 0.0), call.key_mask, blocks, by_torch, curves)


def _walk(call: Call) -> Tensor:
    """A causal call of LLN attention in float32."""

    def by_torch(inputs: Inputs) -> Tensor:
        return eager.attend_dense(call.replace(kind="lln", **inputs._asdict()), walks=True)

    alpha, beta = (_of_heads(call.query, number) for number in (call.alpha, call.beta))
    inputs = Inputs(*call.qkv, alpha, beta, call.key_mask)
    return walk_compiled(inputs, GUARD[call.query.dtype], by_torch)
