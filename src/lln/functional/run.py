"""Runs a checked call: plan → match → announce → run.

Every entry point and every module calls `attend` here, after checking its inputs.

Dimension legend: as in `lln.functional.request`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.cpu import run as compiled
from lln.eager import packing
from lln.eager import run as eager
from lln.eager.dropout import drop_keys
from lln.eager.tiling import cut_tiles
from lln.functional.head_shards import on_own_shards
from lln.functional.key_calls import (
    attend_dense_keys,
    attend_packed_keys,
    chosen_indices,
    complete,
    with_all_keys,
)
from lln.functional.match import match_inputs, match_packed
from lln.functional.padded_keys import pad_call
from lln.functional.plan import Plan, plan_call
from lln.functional.request import Request
from lln.kernels.blocks.block_ops import fused_blocks
from lln.kernels.lln import repeats
from lln.kernels.lln.run import fused_attention
from lln.kernels.lln.slices import AddedBlocks
from lln.observers import Announcement, announce, is_observed
from lln.precision import accumulation_dtype, without_autocast
from lln.tracing import is_compiling, is_sharded, is_untraced_on_cpu, is_watched


def attend(request: Request, impl: str) -> Tensor:
    """Plan a checked call, match its temperatures, announce it and run it.

    Args:
        request: The call.
        impl: ``"auto"``, ``"eager"``, ``"cpu"``, ``"triton"`` or ``"reference"``.

    Returns:
        ``[B, H, T, E]``, or packed ``[T, H, E]``, in the dtype of query.
    """
    if request.block_size:
        tokens = request.query.shape[2] if request.bounds is None else request.longest
        request = request.fitted(request.query.shape[0] if tokens is None else tokens)
    if is_compiling() or is_observed():
        return _attend_once(request, impl)
    out = repeats.run_compiled(request, impl)
    if out is not None:
        return out
    kind = repeats.kind_of(request, impl)
    repeat = repeats.repeat_of(kind)
    if repeat is not None:
        if repeats.again is not None:
            repeats.hand_over(repeat, request, impl)
        return repeat.run(request)
    out = _attend_once(request, impl)
    if kind is not None:
        repeats.remember(kind, request, impl, plan_call(request, impl))
    return out


def _attend_once(request: Request, impl: str) -> Tensor:
    """A call that relies on no earlier one."""
    if is_sharded(request.query):
        return on_own_shards(request, lambda own: attend(own, impl))
    if request.kind == "lln_keys":
        request = with_all_keys(request)
    plan = plan_call(request, impl)
    with without_autocast(request.query):
        if plan.is_padded and request.query.shape[0] > 0:
            return _padded(request, plan)
        if request.kind == "lln_keys":
            request = complete(request, plan)
        elif request.kind != "diag":
            # Compiled passes match temperatures on the way, unless somebody wants to see them.
            is_left = plan.impl == "cpu" and plan.matching is None and not is_observed()
            if request.alpha is None and not is_left:
                request = _matched(request, plan)
        if is_observed():
            _announce(request)
        return _run(request, plan)


def _padded(request: Request, plan: Plan) -> Tensor:
    """Packed sequences with exact keys as dense samples."""
    call = pad_call(request, plan)
    if is_observed():
        _announce(call.as_completed())
    return call.unpad([attend_dense_keys(group, plan) for group in call.groups])


def _matched(request: Request, plan: Plan) -> Request:
    query, key, matching = request.query, request.key, request.matching
    impl = plan.matching or plan.impl
    if request.bounds is None:
        alpha, beta = match_inputs(query, key, matching, request.key_mask, impl)
    else:
        longest = request.longest or 0
        alpha, beta = match_packed(query, key, request.bounds, longest, matching, impl)
    # Written out, because torch.compile can trace the constructor in all versions, not `_replace`.
    return Request(request.kind, query, key, request.value, alpha, beta, *request[6:])


def _announce(request: Request) -> None:
    parts: dict[str, Any] = {"key_mask": request.key_mask, "is_causal": request.is_causal}
    parts["cu_seqlens"] = request.bounds
    if request.kind != "diag":
        parts |= {"alpha": request.alpha, "beta": request.beta}
    if request.kind != "lln":
        parts |= {"block_size": request.block_size, "scale": request.scale}
    if request.kind == "lln_diag":
        parts["mix"] = request.mix
    if request.kind == "lln_keys":
        parts |= {"offset": request.offset, "indices": chosen_indices(request)}
        parts["group_size"] = request.group_size
    announce(Announcement(request.kind, request.query, request.key, **parts))


def _run(request: Request, plan: Plan) -> Tensor:
    if request.bounds is None and request.kind == "lln_keys":
        return attend_dense_keys(request, plan)
    if request.bounds is None:
        return _by_kernels(request, plan) if plan.impl == "triton" else _plain(request, plan)
    if request.query.shape[0] == 0:
        return _nothing(request)
    if request.kind == "lln_keys":
        return attend_packed_keys(request, plan)
    # On a CPU nobody waits to learn the lengths, and tiles of equal size take many times longer.
    own = (*request[1:6], request.mix, request.bounds)
    is_plain = plan.impl in ("eager", "cpu")
    if plan.impl == "reference" or (is_plain and is_untraced_on_cpu(*own)):
        return _one_by_one(request, request.bounds, plan)
    if plan.impl == "triton":
        return _by_kernels(_as_sample(request), plan)[0].transpose(0, 1)
    names = ("alpha", "beta", "mix", "block_size", "scale", "dropout_p", "is_causal", "longest")
    options = {name: getattr(request, name) for name in names}
    return packing.attend(request.query, request.key, request.value, request.bounds, **options)


def _by_kernels(request: Request, plan: Plan) -> Tensor:
    """A call by the kernels; packed sequences go in as one sample together with their bounds."""
    query, key, value = request.query, request.key, request.value
    if request.kind == "diag":
        return _own_blocks(request, drop_keys(value, request.dropout_p), plan)
    lln: dict[str, Any] = {
        "alpha": request.alpha,
        "beta": request.beta,
        "key_mask": request.key_mask,
        "is_causal": request.is_causal,
        "value_width": plan.value_width,
    }
    if request.bounds is not None:
        lln |= {"bounds": request.bounds, "longest": request.longest or query.shape[2]}
    if plan.diagonal is None:
        return fused_attention(query, key, value, dropout_p=request.dropout_p, **lln)
    if plan.diagonal == "joint":
        blocks = {"mix": request.mix, "block_size": plan.block_size, "scale": _scale(request)}
        return fused_attention(query, key, value, dropout_p=request.dropout_p, **blocks, **lln)
    # The same keys are dropped from both parts.
    value = drop_keys(value, request.dropout_p)
    if _adds_in_place(request, plan):
        sizes = (plan.block_size, _scale(request), request.is_causal)
        return fused_attention(
            query, key, value, added=AddedBlocks(float(request.mix), sizes), **lln
        )
    long_range = fused_attention(query, key, value, **lln)
    short_range = _own_blocks(request, value, plan)
    if not isinstance(request.mix, Tensor):
        # PyTorch's interpolation computes half types in float32 and rounds once.
        return eager.join(long_range, short_range, request.mix)
    dtype = accumulation_dtype(query.dtype)
    return eager.join(long_range.to(dtype), short_range.to(dtype), request.mix).to(query.dtype)


def _adds_in_place(request: Request, plan: Plan) -> bool:
    """Whether the diagonal part goes to the same memory; a watched call needs two operators."""
    within = request.value.shape[-1] <= plan.block_value_width
    return plan.diagonal == "added" and within and not is_watched(request.query)


def _own_blocks(request: Request, value: Tensor, plan: Plan) -> Tensor:
    """The diagonal part apart from the LLN kernels: by another kernel, or in PyTorch."""
    query, key = request.query, request.key
    options: dict[str, Any] = {"block_size": plan.block_size, "is_causal": request.is_causal}
    if plan.diagonal in ("beside", "added"):
        options |= {"scale": _scale(request), "value_width": plan.block_value_width}
        if request.bounds is None:
            return fused_blocks(query, key, value, key_mask=request.key_mask, **options)
        tiles = cut_tiles(request.bounds.long(), query.shape[2], plan.block_size)
        packed = (side[0].transpose(0, 1) for side in (query, key, value))
        q, k, v = (tiles.gather(side).transpose(0, 1) for side in packed)
        out = fused_blocks(q, k, v, key_mask=tiles.valid, **options)
        return tiles.scatter(out.transpose(0, 1)).transpose(0, 1)[None]
    options["scale"] = request.scale
    if request.bounds is None:
        return eager.short_range(query, key, value, request.key_mask, impl="eager", **options)
    q, k, v = (side[0].transpose(0, 1) for side in (query, key, value))
    return packing.short_range(q, k, v, request.bounds, **options).transpose(0, 1)[None]


def _plain(request: Request, plan: Plan) -> Tensor:
    """A dense call in plain PyTorch, by compiled passes or by the reference."""
    sides = (request.query, request.key, request.value)
    options: dict[str, Any] = {"is_causal": request.is_causal, "dropout_p": request.dropout_p}
    blocks = {"block_size": request.block_size, "scale": request.scale}
    lln: dict[str, Any] = {"matching": request.matching}
    engine: Any = compiled
    if plan.impl != "cpu":
        engine, lln, options["impl"] = eager, {}, plan.impl
    if request.kind == "diag":
        return engine.short_range(*sides, request.key_mask, **blocks, **options)
    sides = (*sides, request.alpha, request.beta, request.key_mask)
    if request.kind == "lln":
        return engine.long_range(*sides, **lln, **options)
    return engine.both_ranges(*sides, request.mix, **lln, **blocks, **options)


def _scale(request: Request) -> float:
    return request.query.shape[-1] ** -0.5 if request.scale is None else float(request.scale)


def _as_sample(request: Request) -> Request:
    """Packed ``[T, H, D]`` as the one sample ``[1, H, T, D]``."""
    query, key, value = (side.transpose(0, 1)[None] for side in request[1:4])
    mix = request.mix
    if isinstance(mix, Tensor):
        mix = mix.reshape((1,) * (3 - mix.dim()) + tuple(mix.shape)).transpose(0, 1)[None]
    rest = (request.alpha, request.beta, request.matching, mix, *request[8:])
    return Request(request.kind, query, key, value, *rest)


def _nothing(request: Request) -> Tensor:
    """The output ``[0, H, E]`` for no tokens, still connected to the inputs for autograd."""
    query, key, value = request[1:4]
    zero = key.sum() * value.sum()
    for side in (request.alpha, request.beta, request.offset):
        if side is not None:
            zero = zero * (side.sum() if isinstance(side, Tensor) else side)
    rows = query.sum(-1, keepdim=True).expand(-1, -1, value.shape[-1])
    return (rows * zero).to(query.dtype)


def _one_by_one(request: Request, bounds: Tensor, plan: Plan) -> Tensor:
    """Packed sequences with one dense call for each."""
    whole, outs = _as_sample(request), []
    lengths = bounds.diff().tolist()
    # Split, because every slice would add a gradient of the whole length; copied, because views
    # that are split off forbid the caller to change the whole afterwards.
    sides = [_copied(side).split(lengths, 2) for side in whole[1:4]]
    mixes: Any = [whole.mix] * len(lengths)
    if isinstance(whole.mix, Tensor) and whole.mix.shape[2] > 1:
        mixes = _copied(whole.mix).split(lengths, 2)
    for index, (query, key, value, mix) in enumerate(zip(*sides, mixes, strict=True)):
        if lengths[index] == 0:
            continue
        alpha, beta = (_of_sequence(side, index) for side in (request.alpha, request.beta))
        dense = whole._replace(query=query, key=key, value=value, alpha=alpha, beta=beta, mix=mix)
        outs.append(_plain(dense, plan)[0].transpose(0, 1))
    return torch.cat(outs)


def _copied(side: Tensor) -> Tensor:
    """Head by head and row by row, as the products read it."""
    return side.clone(memory_format=torch.contiguous_format)


def _of_sequence(side: float | Tensor, index: int) -> float | Tensor:
    """α or β ``[n, H, 1, 1]`` of one packed sequence."""
    if not isinstance(side, Tensor) or side.dim() < 4 or side.shape[0] == 1:
        return side
    return side[index : index + 1]
