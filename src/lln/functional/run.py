"""Runs a checked call: plan → match → announce → run.

Every entry point and every module calls `attend` here, after checking its inputs.

Dimension legend: as in `lln.functional.call`.
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
from lln.functional.call import Call
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
from lln.kernels.blocks.block_ops import fused_blocks
from lln.kernels.lln import repeats
from lln.kernels.lln.run import fused_attention
from lln.kernels.lln.slices import AddedBlocks
from lln.observers import Announcement, announce, is_observed
from lln.precision import accumulation_dtype, without_autocast
from lln.tracing import is_compiling, is_sharded, is_untraced_on_cpu, is_watched


def attend(call: Call, impl: str) -> Tensor:
    """Plan a checked call, match its temperatures, announce it and run it.

    Args:
        call: The call.
        impl: ``"auto"``, ``"eager"``, ``"cpu"``, ``"triton"`` or ``"reference"``.

    Returns:
        ``[B, H, T, E]``, or packed ``[T, H, E]``, in the dtype of query.
    """
    call = call.with_fitted_blocks()
    if is_compiling() or is_observed():
        return _attend_once(call, impl)
    out = repeats.run_compiled(call, impl)
    if out is not None:
        return out
    kind = repeats.kind_of(call, impl)
    repeat = repeats.repeat_of(kind)
    if repeat is not None:
        if repeats.try_fast_path is not None:
            repeats.register_native(repeat, call, impl)
        return repeat.run(call)
    out = _attend_once(call, impl)
    if kind is not None:
        repeats.record(kind, call, impl, plan_call(call, impl))
    return out


def _attend_once(call: Call, impl: str) -> Tensor:
    """A call that relies on no earlier one."""
    if is_sharded(call.query):
        return on_own_shards(call, lambda own: attend(own, impl))
    if call.kind == "lln_keys":
        call = with_all_keys(call)
    plan = plan_call(call, impl)
    with without_autocast(call.query):
        if plan.is_padded and call.query.shape[0] > 0:
            return _padded(call, plan)
        if call.kind == "lln_keys":
            call = complete(call, plan)
        elif call.kind != "diag":
            # Compiled passes match temperatures on the way, unless somebody wants to see them.
            is_left = plan.impl == "cpu" and plan.matching is None and not is_observed()
            if call.alpha is None and not is_left:
                call = _matched(call, plan)
        if is_observed():
            _announce(call)
        return _run(call, plan)


def _padded(call: Call, plan: Plan) -> Tensor:
    """Packed sequences with exact keys as dense samples."""
    padded = pad_call(call, plan)
    if is_observed():
        _announce(padded.as_completed())
    return padded.unpad([attend_dense_keys(group, plan) for group in padded.groups])


def _matched(call: Call, plan: Plan) -> Call:
    query, key, matching = call.query, call.key, call.matching
    impl = plan.matching or plan.impl
    if call.bounds is None:
        alpha, beta = match_inputs(query, key, matching, call.key_mask, impl)
    else:
        longest = call.longest or 0
        alpha, beta = match_packed(query, key, call.bounds, longest, matching, impl)
    return call.replace(alpha=alpha, beta=beta)


def _announce(call: Call) -> None:
    parts: dict[str, Any] = {"key_mask": call.key_mask, "is_causal": call.is_causal}
    parts["cu_seqlens"] = call.bounds
    if call.kind != "diag":
        parts |= {"alpha": call.alpha, "beta": call.beta}
    if call.kind != "lln":
        parts |= {"block_size": call.block_size, "scale": call.scale}
    if call.kind == "lln_diag":
        parts["mix"] = call.mix
    if call.kind == "lln_keys":
        parts |= {"offset": call.offset, "indices": chosen_indices(call)}
        parts["group_size"] = call.group_size
    announce(Announcement(call.kind, call.query, call.key, **parts))


def _run(call: Call, plan: Plan) -> Tensor:
    if call.bounds is None and call.kind == "lln_keys":
        return attend_dense_keys(call, plan)
    if call.bounds is None:
        return _by_kernels(call, plan) if plan.impl == "triton" else _plain(call, plan)
    if call.query.shape[0] == 0:
        return _nothing(call)
    if call.kind == "lln_keys":
        return attend_packed_keys(call, plan)
    # On a CPU nobody waits to learn the lengths, and tiles of equal size take many times longer.
    own = (*call.qkv, call.alpha, call.beta, call.mix, call.bounds)
    is_plain = plan.impl in ("eager", "cpu")
    if plan.impl == "reference" or (is_plain and is_untraced_on_cpu(*own)):
        return _one_by_one(call, call.bounds, plan)
    if plan.impl == "triton":
        return _by_kernels(_as_sample(call), plan)[0].transpose(0, 1)
    names = ("alpha", "beta", "mix", "block_size", "scale", "dropout_p", "is_causal", "longest")
    options = {name: getattr(call, name) for name in names}
    return packing.attend(call.query, call.key, call.value, call.bounds, **options)


def _by_kernels(call: Call, plan: Plan) -> Tensor:
    """A call by the kernels; packed sequences go in as one sample together with their bounds."""
    query, key, value = call.query, call.key, call.value
    if call.kind == "diag":
        return _own_blocks(call, drop_keys(value, call.dropout_p), plan)
    lln: dict[str, Any] = {
        "alpha": call.alpha,
        "beta": call.beta,
        "key_mask": call.key_mask,
        "is_causal": call.is_causal,
        "value_width": plan.value_width,
    }
    if call.bounds is not None:
        lln |= {"bounds": call.bounds, "longest": call.longest or query.shape[2]}
    if plan.diagonal is None:
        return fused_attention(query, key, value, dropout_p=call.dropout_p, **lln)
    if plan.diagonal == "joint":
        blocks = {"mix": call.mix, "block_size": plan.block_size, "scale": call.factor}
        return fused_attention(query, key, value, dropout_p=call.dropout_p, **blocks, **lln)
    # The same keys are dropped from both parts.
    value = drop_keys(value, call.dropout_p)
    if _adds_in_place(call, plan):
        sizes = (plan.block_size, call.factor, call.is_causal)
        return fused_attention(query, key, value, added=AddedBlocks(float(call.mix), sizes), **lln)
    long_range = fused_attention(query, key, value, **lln)
    short_range = _own_blocks(call, value, plan)
    if not isinstance(call.mix, Tensor):
        # PyTorch's interpolation computes half types in float32 and rounds once.
        return eager.join(long_range, short_range, call.mix)
    dtype = accumulation_dtype(query.dtype)
    return eager.join(long_range.to(dtype), short_range.to(dtype), call.mix).to(query.dtype)


def _adds_in_place(call: Call, plan: Plan) -> bool:
    """Whether the diagonal part goes to the same memory; a watched call needs two operators."""
    within = call.value.shape[-1] <= plan.block_value_width
    return plan.diagonal == "added" and within and not is_watched(call.query)


def _own_blocks(call: Call, value: Tensor, plan: Plan) -> Tensor:
    """The diagonal part apart from the LLN kernels: by another kernel, or in PyTorch."""
    query, key = call.query, call.key
    options: dict[str, Any] = {"block_size": plan.block_size, "is_causal": call.is_causal}
    if plan.diagonal in ("beside", "added"):
        options |= {"scale": call.factor, "value_width": plan.block_value_width}
        if call.bounds is None:
            return fused_blocks(query, key, value, key_mask=call.key_mask, **options)
        tiles = cut_tiles(call.bounds.long(), query.shape[2], plan.block_size)
        packed = (side[0].transpose(0, 1) for side in (query, key, value))
        q, k, v = (tiles.gather(side).transpose(0, 1) for side in packed)
        out = fused_blocks(q, k, v, key_mask=tiles.valid, **options)
        return tiles.scatter(out.transpose(0, 1)).transpose(0, 1)[None]
    options["scale"] = call.scale
    if call.bounds is None:
        return eager.short_range(query, key, value, call.key_mask, impl="eager", **options)
    q, k, v = (side[0].transpose(0, 1) for side in (query, key, value))
    return packing.short_range(q, k, v, call.bounds, **options).transpose(0, 1)[None]


def _plain(call: Call, plan: Plan) -> Tensor:
    """A dense call in plain PyTorch, by compiled passes or by the reference."""
    sides = (call.query, call.key, call.value)
    options: dict[str, Any] = {"is_causal": call.is_causal, "dropout_p": call.dropout_p}
    blocks = {"block_size": call.block_size, "scale": call.scale}
    lln: dict[str, Any] = {"matching": call.matching}
    engine: Any = compiled
    if plan.impl != "cpu":
        engine, lln, options["impl"] = eager, {}, plan.impl
    if call.kind == "diag":
        return engine.short_range(*sides, call.key_mask, **blocks, **options)
    sides = (*sides, call.alpha, call.beta, call.key_mask)
    if call.kind == "lln":
        return engine.long_range(*sides, **lln, **options)
    return engine.both_ranges(*sides, call.mix, **lln, **blocks, **options)


def _as_sample(call: Call) -> Call:
    """Packed ``[T, H, D]`` as the one sample ``[1, H, T, D]``."""
    query, key, value = (side.transpose(0, 1)[None] for side in call.qkv)
    mix = call.mix
    if isinstance(mix, Tensor):
        mix = mix.reshape((1,) * (3 - mix.dim()) + tuple(mix.shape)).transpose(0, 1)[None]
    return call.replace(query=query, key=key, value=value, mix=mix)


def _nothing(call: Call) -> Tensor:
    """The output ``[0, H, E]`` for no tokens, still connected to the inputs for autograd."""
    query, key, value = call.qkv
    zero = key.sum() * value.sum()
    for side in (call.alpha, call.beta, call.offset):
        if side is not None:
            zero = zero * (side.sum() if isinstance(side, Tensor) else side)
    rows = query.sum(-1, keepdim=True).expand(-1, -1, value.shape[-1])
    return (rows * zero).to(query.dtype)


def _one_by_one(call: Call, bounds: Tensor, plan: Plan) -> Tensor:
    """Packed sequences with one dense call for each."""
    whole, outs = _as_sample(call), []
    lengths = bounds.diff().tolist()
    # Split, because every slice would add a gradient of the whole length; copied, because views
    # that are split off forbid the caller to change the whole afterwards.
    sides = [_copied(side).split(lengths, 2) for side in whole.qkv]
    mixes: Any = [whole.mix] * len(lengths)
    if isinstance(whole.mix, Tensor) and whole.mix.shape[2] > 1:
        mixes = _copied(whole.mix).split(lengths, 2)
    for index, (query, key, value, mix) in enumerate(zip(*sides, mixes, strict=True)):
        if lengths[index] == 0:
            continue
        alpha, beta = (_of_sequence(side, index) for side in (call.alpha, call.beta))
        dense = whole.replace(query=query, key=key, value=value, alpha=alpha, beta=beta, mix=mix)
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
