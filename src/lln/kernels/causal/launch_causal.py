"""Causal attention from tensors to kernels: stretches, their states, walks and repairs.

Dimension legend: B samples (or packed sequences), H query heads, Hk key heads, T tokens, D head
width, E value width. Every query head has its own walk, so there are H summaries.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from lln.kernels.blocks.launch_blocks import starts_of
from lln.kernels.causal.launch_chunks import (
    STATE,
    ChunkedCall,
    exponent_type,
    scan_step,
    state_of,
)
from lln.kernels.causal.triton_walk_keys import causal_key_kernel
from lln.kernels.causal.triton_walk_outputs import causal_fwd_kernel
from lln.kernels.causal.triton_walk_queries import causal_query_kernel
from lln.kernels.causal.triton_walk_states import causal_gather_kernel
from lln.kernels.launching.recipes import Recipe, Step, Workspace, over_tiles
from lln.kernels.launching.shapes import output_like
from lln.kernels.launching.sizes import Sizes
from lln.kernels.launching.stretches import Tile, cdiv, walk_stretch
from lln.kernels.summaries.gradients import launch_gradients
from lln.kernels.summaries.launch_passes import summarise_steps
from lln.kernels.summaries.lln_call import (
    Gradients,
    LLNCall,
    constant_args,
    launch_call,
    runtime_args,
)

# What a weight is rounded to for a product. The exponent range of float16 is too small for
# e^{x − max}, so float16 calls use TF32, which has as many digits.
_LOW = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float32, torch.float32: tl.float32}


def attend_causal(
    call: LLNCall, save: bool, out: Tensor | None = None
) -> tuple[Tensor, None, None]:
    """Output ``[B, H, T, E]``; nothing but the inputs is saved."""
    query, heads = call.query, call.query.shape[1]
    given = out
    out = output_like(query, call.value.shape[3]) if out is None else out
    if out.numel() == 0:
        return out, None, None
    runtime = runtime_args(call, out, heads)
    runtime["p_o"] = out
    launch_call("causal", call, runtime, heads, _write_attend, others=(given,))
    return out, None, None


def causal_gradients(
    call: LLNCall,
    gradient: Tensor,
    log_mass: Tensor | None,
    centroid: Tensor | None,
    wanted: tuple[bool, bool, bool],
    dv_out: Tensor | None = None,
) -> Gradients:
    """Gradients of query, key, value, and of alpha, beta and mix where wanted."""
    heads = call.query.shape[1]

    def parts_of(_: int) -> tuple[tuple[int, ...], ...]:
        return ((call.samples, heads, _segments(call, call.sizes(heads))[0]),) * 3

    return launch_gradients(
        "causal backward", call, gradient, heads, wanted, dv_out, parts_of, _write_backward
    )


def _segments(call: LLNCall, chosen: Sizes) -> tuple[int, int]:
    """How many stretches a sequence is cut into, and tokens per stretch, a multiple of the tile."""
    programs = call.samples * call.query.shape[1]
    longest = call.reach(call.longest or call.query.shape[2])
    rows = _largest_tile(chosen)
    if call.block_size:
        # Tiles with blocks of an odd size fit only the joint walk; the others mask the excess rows.
        whole = chosen.block_rows == chosen.walk.tokens
        rows = max(rows, chosen.block_rows) if whole else chosen.block_rows
    stretch = walk_stretch(chosen.walk, longest, rows, programs, chosen.cores)
    return cdiv(longest, stretch), stretch


def _largest_tile(chosen: Sizes) -> int:
    tiles = (chosen.walk, chosen.walk_query, chosen.walk_key, chosen.summarise)
    return max(tile.tokens for tile in tiles)


def _values(
    call: LLNCall, chosen: Sizes, runtime: dict[str, Any], segments: int, stretch: int
) -> dict[str, Any]:
    query = call.query
    even = call.mask is None and call.bounds is None
    even = even and query.shape[2] % _largest_tile(chosen) == 0
    if call.block_size and chosen.block_rows != chosen.walk.tokens:
        even = False
    return constant_args(call, chosen, runtime, query.shape[1]) | {
        "LOW": _LOW[query.dtype],
        "EXP": tl.float64 if query.dtype == torch.float32 else tl.float32,
        "EVEN": even,
        "ONE_BLOCK": chosen.walk.tokens == call.block_size,
        "HAS_STATE": segments > 1,
        "segments": segments,
        "program_tokens": stretch,
    }


def _start(call: LLNCall, chosen: Sizes, values: dict[str, Any]) -> tuple[list[Step], Workspace]:
    """Launches and memory for the state before every stretch, and for marking lost stretches."""
    programs, segments = call.samples * call.query.shape[1], values["segments"]
    steps, workspace = starts_of(call)
    workspace |= {"p_lost": ((programs, segments), torch.int32)}
    if segments == 1:
        return steps, workspace | {f"{name}_before": ((1,), torch.float32) for name in STATE}
    more, parts = summarise_steps(programs, chosen, values, segments)
    scan = scan_step("", "_before", programs, chosen, values)
    return [*steps, *more, scan], workspace | parts | {f"{n}_before": parts[n] for n in STATE}


def _walk(
    kernel: Any, call: LLNCall, chosen: Sizes, tile: Tile, values: dict[str, Any]
) -> list[Step]:
    """The fast walk, and the exact one for the stretches it marked as lost."""
    grid = (values["segments"], call.samples * call.query.shape[1])
    rows = chosen.block_rows if call.block_size else tile.tokens
    return [
        over_tiles(kernel, grid, values, tile, tile_tokens=rows, EXACT=exact)
        for exact in (False, True)
    ]


def _write_attend(call: LLNCall, runtime: dict[str, Any], chosen: Sizes) -> Recipe:
    chunks = ChunkedCall.of(call, chosen)
    if chunks is not None:
        values = _values(call, chosen, runtime, chunks.segments, chunks.stretch)
        _, repair = _walk(causal_fwd_kernel, call, chosen, chosen.walk, _before(values))
        return chunks.forward(values, repair)
    values = _values(call, chosen, runtime, *_segments(call, chosen))
    steps, workspace = _start(call, chosen, values)
    own = _before(values)
    return Recipe(steps + _walk(causal_fwd_kernel, call, chosen, chosen.walk, own), workspace)


def _before(values: dict[str, Any]) -> dict[str, Any]:
    return values | state_of("_before")


def _write_backward(call: LLNCall, runtime: dict[str, Any], chosen: Sizes, *asked: int) -> Recipe:
    query, heads = call.query, call.query.shape[1]
    chunks = None if any(asked) else ChunkedCall.of(call, chosen)
    if chunks is not None:
        values = _values(call, chosen, runtime, chunks.segments, chunks.stretch)
        values |= dict.fromkeys(("ALPHA_GRAD", "BETA_GRAD", "MIX_GRAD"), 0)
        _, of_query = _walk(causal_query_kernel, call, chosen, chosen.walk_query, _before(values))
        own = values | state_of("_after")
        _, of_key = _walk(causal_key_kernel, call, chosen, chosen.walk_key, own)
        return chunks.backward(values, of_query, of_key)
    # dα and dβ are allocated for the stretches of the first sizes, even if sizes shrank since.
    segments, stretch = _segments(call, call.sizes(heads))
    values = _values(call, chosen, runtime, segments, stretch)
    values |= dict(zip(("ALPHA_GRAD", "BETA_GRAD", "MIX_GRAD"), asked, strict=True))
    steps, workspace = _start(call, chosen, values)
    rows = query.shape[:3]
    workspace |= {"p_z": (rows, exponent_type(query.dtype)), "p_delta": (rows, torch.float32)}
    own = _before(values)
    steps += _walk(causal_query_kernel, call, chosen, chosen.walk_query, own)
    later = "_before"
    if segments > 1:
        later = "_after"
        workspace |= {
            name + suffix: workspace[name] for name in STATE for suffix in ("_own", later)
        }
        programs = call.samples * heads
        own = values | state_of("_own")
        gather, grid = causal_gather_kernel, (segments, programs)
        steps.append(over_tiles(gather, grid, own, chosen.summarise))
        steps.append(scan_step("_own", later, programs, chosen, values))
    own = values | state_of(later)
    steps += _walk(causal_key_kernel, call, chosen, chosen.walk_key, own)
    return Recipe(steps, workspace)
