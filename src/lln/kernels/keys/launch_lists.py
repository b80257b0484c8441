"""Attention to the lists of features from tensors to kernels: allocate, choose sizes, launch.

Dimension legend: see `lln.kernels.keys.launch_keys`; L keys in a list. Entries and runs: see
`lln.kernels.keys.triton_list_read`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.kernels.keys import triton_list_grad as list_grad
from lln.kernels.keys import triton_list_read as list_read
from lln.kernels.keys.keys_call import KeysCall
from lln.kernels.keys.keys_sizes import sizes_of, warps
from lln.kernels.keys.launch_choice import launch
from lln.kernels.launching.kernel_arguments import flat_scale
from lln.kernels.launching.limits import power_of_two
from lln.kernels.launching.recipes import on_device
from lln.kernels.launching.stretches import cdiv

# Entries whose gradients a program adds up: fewer make more pairs, more make fewer programs.
RUN = 512
# Entries in a tile at most; gradients need more registers.
ROWS = {"read": 64, "grad": 32}
# Tiles that are fetched ahead.
STAGES = {"read": 2, "grad": 2}
_OF_LISTS = ("W", "D", "E", "BD", "BE", "BK", "MORE", "R", "HAS_MASK", "PRECISION")
_OF_BLOCKS = ("W", "D", "E", "BD", "BE", "BW", "R", "HAS_MASK", "EVEN", "PRECISION")
_OF_SUMMARIES = ("SR", "HAS_ALPHA", "HAS_BETA", "HAS_OFFSET")


def read(
    call: KeysCall, out: Tensor, lse: Tensor, levels: Tensor, summary: tuple[Tensor, ...]
) -> None:
    """Write the output, the log-normalisers and the slots' levels."""
    query, key, value = call.query, call.key, call.value
    batch, heads, tokens, _ = query.shape
    lines, device = batch * heads, query.device
    part = torch.empty((lines, 2 * tokens, value.shape[3]), dtype=query.dtype, device=device)
    part_lse = torch.empty((lines, 2 * tokens), device=device)
    part_seen = torch.empty((lines, 2 * tokens), dtype=torch.int32, device=device)
    parts = (part, part_lse, part_seen)
    sizes, masking, rows = sizes_of(call), call.masking, _rows("read", call)
    runs = _most_runs(call, rows)
    with on_device(device):
        launch(
            list_read.list_read_kernel, (runs * lines,), query, key, value, *parts,
            *call.lists, *masking[:2], call.scale, tokens, heads, *_list_numbers(call, runs),
            *query.stride(), *key.stride(), *value.stride(),
            **{name: sizes[name] for name in _OF_LISTS}, BM=rows, **_list_sizes(call),
            STAGES=STAGES["read"], num_warps=_warps(call),
        )  # fmt: skip
        launch(
            list_read.list_join_kernel, (call.blocks * lines,), query, key, value, out, lse, levels,
            *summary, *parts, *masking, flat_scale(call.alpha, batch, query), call.flat_beta,
            flat_scale(call.offset, batch, query), call.alpha_number, call.beta_number,
            call.offset_number, call.scale, tokens, heads, call.blocks, *query.stride(),
            *key.stride(), *value.stride(), *out.stride(),
            **{name: sizes[name] for name in _OF_BLOCKS + _OF_SUMMARIES},
            num_warps=warps("read", sizes),
        )  # fmt: skip


def lists_of_runs(call: KeysCall) -> Tensor:
    """The list of every run of the gradients: int32 ``[B, H, runs, L]``; -1 = none."""
    batch, heads = call.query.shape[:2]
    lists, width = call.lists, call.query.shape[3]
    longest, runs = lists.keys.shape[4], _most_runs(call, RUN)
    shape = (batch, heads, runs, longest)
    found = torch.empty(shape, dtype=torch.int32, device=call.query.device)
    with on_device(call.query.device):
        launch(
            list_grad.run_lists_kernel, (runs * batch * heads,), lists.keys, lists.starts, found,
            longest, runs, F=2 * width, BF=_list_sizes(call)["BF"], BL=power_of_two(longest),
            C=RUN, R=heads // call.key.shape[1], num_warps=1,
        )  # fmt: skip
    return found


def gradients(
    call: KeysCall,
    gradient: Tensor,
    dq: Tensor,
    lse: Tensor,
    delta: Tensor,
    pairs: tuple[Tensor, Tensor],
    masking: tuple[Tensor, Tensor],
    first: int,
    count: int,
    runs: int,
) -> None:
    """Add block and lists to dq of ``count`` query heads from ``first`` on, and write their pairs.

    Args:
        call: The call.
        gradient: Of the output.
        dq: The slots' share.
        lse: Log-normalisers.
        delta: Row sums of gradient times output.
        pairs: Where dk and dv of every (run, key of its list) go.
        masking: The mask as bytes, and where the first blocks begin.
        first: First of the heads.
        count: How many.
        runs: Runs of a head.
    """
    query, key, value = call.query, call.key, call.value
    _, heads, tokens, width = query.shape
    part = torch.empty((count, 2 * tokens, width), dtype=query.dtype, device=query.device)
    sizes = sizes_of(call)
    strides = (*query.stride(), *key.stride(), *value.stride(), *gradient.stride())
    launch(
        list_grad.list_grad_kernel, (runs * count,), query, key, value, gradient, lse, delta, part,
        *pairs, *call.lists, *masking, call.scale, first, tokens, heads,
        *_list_numbers(call, runs), *strides, **{name: sizes[name] for name in _OF_LISTS},
        EVEN=sizes["EVEN"], BM=_rows("grad", call), C=RUN, **_list_sizes(call),
        STAGES=STAGES["grad"], num_warps=_warps(call),
    )  # fmt: skip
    launch(
        list_grad.list_near_kernel, (call.blocks * count,), query, key, value, gradient, dq, lse,
        delta, part, *masking, call.scale, first, tokens, heads, call.blocks, *strides,
        *dq.stride(), **{name: sizes[name] for name in _OF_BLOCKS}, num_warps=warps("far", sizes),
    )  # fmt: skip


def numbers_per_head(call: KeysCall) -> int:
    """How many numbers the entries' shares of dq take for one query head."""
    return 2 * call.query.shape[2] * call.query.shape[3]


def _most_runs(call: KeysCall, rows: int) -> int:
    """How many runs of so many entries a head can have at most, without looking at the data."""
    entries, features = 2 * call.query.shape[2], 2 * call.query.shape[3]
    return entries // rows + min(features, entries)


def _rows(kind: str, call: KeysCall) -> int:
    """Entries in a tile: about as many as a feature has, if features are equally frequent."""
    tokens, width = call.query.shape[2:]
    most = ROWS[kind] // 2 if _is_wide(call) else ROWS[kind]
    return max(16, min(most, power_of_two(cdiv(tokens, width))))


def _warps(call: KeysCall) -> int:
    return 8 if _is_wide(call) else 4


def _is_wide(call: KeysCall) -> bool:
    """Whether a row has more than 128 bytes."""
    return max(call.query.shape[3], call.value.shape[3]) * call.query.itemsize > 128


def _list_numbers(call: KeysCall, runs: int) -> tuple[int, ...]:
    """L, most runs of a head, words of a key's bits, and how far a second table is."""
    keys, members = call.lists.keys, call.lists.members
    return keys.shape[4], runs, members.shape[3], keys.stride(0)


def _list_sizes(call: KeysCall) -> dict[str, Any]:
    features = 2 * call.query.shape[3]
    return {"BF": max(16, power_of_two(features)), "TABLES": call.indices.shape[0]}
