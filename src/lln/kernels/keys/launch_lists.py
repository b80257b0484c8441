"""The launches of attention to the lists of features.

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
from lln.kernels.keys.keys_sizes import warps
from lln.kernels.launching.limits import power_of_two
from lln.kernels.launching.recipes import Recipe, Step, Workspace, launch_fixed
from lln.kernels.launching.stretches import cdiv

# Entries whose gradients a program adds up: fewer make more pairs, more make fewer programs.
RUN = 512
# Entries in a tile at most; gradients need more registers.
ROWS = {"read": 64, "grad": 32}
# Tiles that are fetched ahead.
STAGES = {"read": 2, "grad": 2}


def read_recipe(call: KeysCall, values: dict[str, Any]) -> Recipe:
    """Write the output, the log-normalisers and the slots' levels."""
    lines, tokens = call.query.shape[0] * call.query.shape[1], call.query.shape[2]
    rows = _rows("read", call)
    runs = _most_runs(call, rows)
    workspace: Workspace = {
        "p_part": ((lines, 2 * tokens, call.value.shape[3]), call.query.dtype),
        "p_part_lse": ((lines, 2 * tokens), torch.float32),
        "p_part_seen": ((lines, 2 * tokens), torch.int32),
    }
    own = {**_list_args(call, runs), "BM": rows, "STAGES": STAGES["read"]}
    grid, blocks = (runs * lines,), (call.blocks * lines,)
    read = Step(list_read.list_read_kernel, grid, values | own, _warps(call))
    join = Step(list_read.list_join_kernel, blocks, values, warps("read", values))
    return Recipe([read, join], workspace)


def lists_of_runs(call: KeysCall) -> Tensor:
    """The list of every run of the gradients: int32 ``[B, H, runs, L]``; -1 = none."""
    batch, heads = call.query.shape[:2]
    longest, runs = call.lists.keys.shape[4], _most_runs(call, RUN)
    shape, device = (batch, heads, runs, longest), call.query.device
    found = torch.empty(shape, dtype=torch.int32, device=device)

    def write() -> Recipe:
        values = {**_list_args(call, runs), "C": RUN, "BL": power_of_two(longest)}
        values |= {"F": 2 * call.query.shape[3], "R": heads // call.key.shape[1]}
        return Recipe([Step(list_grad.run_lists_kernel, (runs * batch * heads,), values, 1)], {})

    runtime = {"p_lists": call.lists.keys, "p_starts": call.lists.starts, "p_out": found}
    launch_fixed("lists of runs", runtime, device, write)
    return found


def gradient_steps(
    call: KeysCall, values: dict[str, Any], first: int, count: int, runs: int
) -> list[Step]:
    """Add block and lists to dq of ``count`` query heads from ``first`` on, and write their pairs.

    Args:
        call: The call.
        values: The kernels' arguments.
        first: First of the heads.
        count: How many.
        runs: Runs of a head.
    """
    values = values | {"first_head": first}
    own = {**_list_args(call, runs), "BM": _rows("grad", call), "C": RUN}
    own["STAGES"] = STAGES["grad"]
    grid, blocks = (runs * count,), (call.blocks * count,)
    return [
        Step(list_grad.list_grad_kernel, grid, values | own, _warps(call)),
        Step(list_grad.list_near_kernel, blocks, values, warps("far", values)),
    ]


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


def _list_args(call: KeysCall, runs: int) -> dict[str, int]:
    """L, most runs of a head, words of a key's bits, how far a second table is, and sizes."""
    keys, members = call.lists.keys, call.lists.members
    numbers = {"L": keys.shape[4], "runs": runs, "words": members.shape[3], "table": keys.stride(0)}
    features = max(16, power_of_two(2 * call.query.shape[3]))
    return {**numbers, "BF": features, "TABLES": keys.shape[0]}
