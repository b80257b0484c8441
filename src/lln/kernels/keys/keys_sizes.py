"""How attention with exact keys is cut into tiles and warps: fixed choices.

Dimension legend: see `lln.kernels.keys.launch_keys`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lln.kernels.keys.keys_call import KeysCall
from lln.kernels.launching.kernel_arguments import precision_of, strides_of
from lln.kernels.launching.limits import power_of_two

# Bytes of the tiles in which chosen keys, and the gradients of pairs, are read.
TILE_BYTES = 8 * 1024
# Tiles that are fetched ahead.
STAGES = {"key": 1, "chosen": 2}


def constant_args(call: KeysCall, **others: Tensor) -> dict[str, Any]:
    """The arguments that calls of one kind share, by their names in the kernels.

    ``others`` are tensors besides query, key and value whose strides the kernels need.
    """
    (heads, tokens, width), value_width = call.query.shape[1:], call.value.shape[3]
    chosen = max(16, min(rows_at_once(call), power_of_two(call.indices.shape[-1])))
    return {
        "T": tokens,
        "S": call.key.shape[2],
        "H": heads,
        "HK": call.key.shape[1],
        "SH": call.summary_heads,
        "G": call.groups,
        "K": call.indices.shape[3],
        "blocks": call.blocks,
        "held": call.held,
        "scale": call.scale,
        "W": call.block_size,
        "D": width,
        "E": value_width,
        "BD": max(16, power_of_two(width)),
        "BE": max(16, power_of_two(value_width)),
        "BM": max(16, call.group_size),
        "BW": max(16, call.block_size),
        "BK": chosen,
        "MORE": call.indices.shape[-1] > chosen,
        "GROUP": call.group_size,
        "R": heads // call.key.shape[1],
        "SR": heads // call.summary_heads,
        "HAS_ALPHA": call.alpha is not None,
        "HAS_BETA": call.beta is not None,
        "HAS_OFFSET": call.offset is not None,
        "HAS_MASK": call.mask is not None,
        "EVEN": call.mask is None and tokens % call.block_size == 0,
        "PRECISION": precision_of(call.query, max(width, value_width)),
        **strides_of(False, p_q=call.query, p_k=call.key, p_v=call.value, **others),
    }


def slot_tile(call: KeysCall) -> tuple[int, int]:
    """Tokens in a tile of the slots' gradients, and how many tiles are fetched ahead."""
    widest = max(call.query.shape[3], call.value.shape[3])
    row_bytes = power_of_two(widest) * call.query.itemsize
    if row_bytes <= 128:
        return 64, 3
    return (32, 2) if row_bytes <= 256 else (16, 2)


def rows_at_once(call: KeysCall) -> int:
    """Rows of a tile of chosen keys or pairs."""
    widest = max(call.query.shape[3], call.value.shape[3])
    rows = TILE_BYTES // (max(16, power_of_two(widest)) * call.query.itemsize)
    return max(16, min(64, rows))


def warps(sizes: dict[str, Any]) -> int:
    """Warps of a program."""
    return 8 if _is_wide(sizes) else 4


def _is_wide(sizes: dict[str, Any]) -> bool:
    return max(sizes["BD"], sizes["BE"]) > 64 or sizes["BM"] > 64


def registers(sizes: dict[str, Any]) -> int:
    """A limit with which three programs fit a multiprocessor; 24 bytes of each thread spill."""
    return 0 if _is_wide(sizes) else 168
