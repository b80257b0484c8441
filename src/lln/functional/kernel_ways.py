"""The ways of the fused kernels of a GPU (`lln.kernels`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.checks.call import Call
from lln.eager import packing
from lln.eager import run as eager
from lln.eager.band import places_of
from lln.eager.dropout import drop_keys
from lln.eager.summary import heads_of
from lln.eager.tiling import cut_tiles
from lln.functional.one_by_one import as_sample
from lln.functional.way import Prepared, Way
from lln.kernels.blocks.block_ops import fused_blocks, fused_window
from lln.kernels.launching.limits import (
    MAX_WIDTH,
    blocks_fit,
    blocks_join,
    blocks_span,
    why_unavailable,
    widest_block_value,
    widest_value,
)
from lln.kernels.lln.run import fused_attention
from lln.kernels.lln.slices import AddedBlocks
from lln.kernels.summaries.summary_ops import fused_decode
from lln.precision import accumulation_dtype
from lln.tracing import is_compiling, is_transformed, is_watched

# Heads up to this width keep all channels of the values in a kernel that also computes blocks.
WIDEST_WITH_BLOCKS = 128


def why_no_kernels(query: Tensor) -> str | None:
    """Why no kernel computes anything of such queries; None if some can."""
    reason = why_unavailable(query)
    if reason is None and not is_compiling() and is_transformed():
        # An operator whose gradient is written in Python has none under torch.func: grad would
        # fail, and jvp would silently give zeros.
        reason = "does not run under torch.func's transforms"
    return reason


class KernelWay(Way):
    """What the fused kernels compute."""

    impl = "triton"

    def why_not(self, call: Call) -> str | None:
        """See `Way.why_not`."""
        return why_no_kernels(call.query)

    def pays(self, call: Call) -> bool:
        """On a GPU; Triton's interpreter is for tests."""
        return call.query.device.type == "cuda"


class Kernels(KernelWay):
    """LLN attention, and blocks that fit a tile or can be cut into tiles."""

    name = "fused kernels"
    kinds = ("lln", "diag", "lln_diag")

    def why_not(self, call: Call) -> str | None:
        """See `Way.why_not`."""
        reason = super().why_not(call)
        if reason is not None or call.kind == "lln" or _diagonal(call)[0] is not None:
            return reason
        masked = " with a key mask" if call.key_mask is not None else ""
        blocks = f"{call.block_rows} tokens by {call.query.shape[-1]} channels{masked}"
        return f"has no tile for blocks of {blocks} here; use smaller blocks"

    def prepare(self, call: Call) -> Prepared:
        """See `Way.prepare`."""
        query, rows = call.query, call.block_rows
        heads = call.samples * query.shape[1]
        width = 0 if call.kind == "diag" else widest_value(query, heads, 0, call.is_causal, False)
        if call.kind == "lln":
            return Prepared(self, value_width=width)
        diagonal, block_width = _diagonal(call)
        if diagonal == "joint":
            width = widest_value(query, heads, rows, call.is_causal, call.mix_learns)
        return Prepared(self, rows, diagonal, width, block_width)

    def describe(self, prepared: Prepared) -> str:
        """A sentence on what computes a prepared call."""
        blocks = f"blocks of {prepared.block_size} tokens"
        channels = prepared.value_width or prepared.block_value_width
        slices = f", up to {channels} channels per launch"
        if prepared.diagonal is None:
            return f"The fused kernels compute LLN attention{slices}."
        tiled = ", tile by tile" if prepared.diagonal == "tiled" else ""
        if not prepared.value_width:
            return f"A fused kernel computes {blocks}{tiled}{slices}."
        how = {
            "joint": f"and {blocks} in one pass",
            "separate": f"and another kernel {blocks}",
            "tiled": f"and others {blocks}{tiled}",
            "added": f"and others add {blocks}, tile by tile",
            "eager": f"and PyTorch {blocks}, which fit no tile of this chip",
        }
        return f"The fused kernels compute LLN attention {how[prepared.diagonal]}{slices}."

    def attend_packed(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.attend_packed`; the kernels take one sample together with its bounds."""
        return self.attend_dense(as_sample(call), prepared)[0].transpose(0, 1)

    def attend_dense(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.attend_dense`."""
        query, key, value = call.qkv
        if call.kind == "diag":
            return self.own_blocks(call, drop_keys(value, call.dropout_p), prepared)
        lln: dict[str, Any] = {
            "alpha": call.alpha,
            "beta": call.beta,
            "key_mask": call.key_mask,
            "is_causal": call.is_causal,
            "value_width": prepared.value_width,
        }
        if call.bounds is not None:
            lln |= {"bounds": call.bounds, "longest": call.longest or query.shape[2]}
        if prepared.diagonal is None:
            return fused_attention(query, key, value, dropout_p=call.dropout_p, **lln)
        if prepared.diagonal == "joint":
            blocks = {"mix": call.mix, "block_size": prepared.block_size, "scale": call.factor}
            return fused_attention(query, key, value, dropout_p=call.dropout_p, **blocks, **lln)
        # The same keys are dropped from both parts.
        value = drop_keys(value, call.dropout_p)
        if prepared.diagonal == "added":
            added = AddedBlocks(float(call.mix), (prepared.block_size, call.factor, call.is_causal))
            return fused_attention(query, key, value, added=added, **lln)
        long_range = fused_attention(query, key, value, **lln)
        short_range = self.own_blocks(call, value, prepared)
        if not isinstance(call.mix, Tensor):
            # PyTorch's interpolation computes half types in float32 and rounds once.
            return eager.join(long_range, short_range, call.mix)
        dtype = accumulation_dtype(query.dtype)
        return eager.join(long_range.to(dtype), short_range.to(dtype), call.mix).to(query.dtype)

    def own_blocks(self, call: Call, value: Tensor, prepared: Prepared) -> Tensor:
        """The blocks ``[B, H, T, E]`` by kernels of their own."""
        query, key = call.query, call.key
        if prepared.diagonal == "tiled":
            rest = {"is_causal": call.is_causal, "scale": call.factor, "blocks": True}
            own: dict[str, Any] = {"key_mask": None, "places": None, **rest}
            return fused_window(query, key, value, window=prepared.block_size, **own)
        options: dict[str, Any] = {
            "block_size": prepared.block_size,
            "is_causal": call.is_causal,
            "scale": call.factor,
            "value_width": prepared.block_value_width,
        }
        if call.bounds is None:
            return fused_blocks(query, key, value, key_mask=call.key_mask, **options)
        tiles = cut_tiles(call.bounds.long(), query.shape[2], prepared.block_size)
        packed = (side[0].transpose(0, 1) for side in (query, key, value))
        q, k, v = (tiles.gather(side).transpose(0, 1) for side in packed)
        out = fused_blocks(q, k, v, key_mask=tiles.valid, **options)
        return tiles.scatter(out.transpose(0, 1)).transpose(0, 1)[None]


class KernelsBesidePlainBlocks(Kernels):
    """LLN attention by kernels, and blocks that fit no tile of the chip by PyTorch."""

    name = "fused kernels, blocks in plain PyTorch"
    kinds = ("lln_diag",)
    is_whole = False

    def why_not(self, call: Call) -> str | None:
        """See `Way.why_not`."""
        return why_no_kernels(call.query)

    def prepare(self, call: Call) -> Prepared:
        """See `Way.prepare`."""
        heads = call.samples * call.query.shape[1]
        width = widest_value(call.query, heads, 0, call.is_causal, False)
        return Prepared(self, call.block_rows, "eager", width)

    def own_blocks(self, call: Call, value: Tensor, prepared: Prepared) -> Tensor:
        """The blocks ``[B, H, T, E]`` in plain PyTorch."""
        rows = prepared.block_size
        if call.bounds is None:
            # Keys have been dropped.
            blocks = call.replace(kind="diag", value=value, block_size=rows, dropout_p=0.0)
            return eager.attend_dense(blocks)
        q, k, v = (side[0].transpose(0, 1) for side in (call.query, call.key, value))
        blocks = call.replace(query=q, key=k, value=v, block_size=rows)
        return packing.short_range(blocks).transpose(0, 1)[None]


class WindowKernel(KernelWay):
    """Softmax inside a sliding window, tile by tile."""

    name = "window kernel"
    kinds = ("window",)

    def why_not(self, call: Call) -> str | None:
        """See `Way.why_not`."""
        reason = super().why_not(call)
        if reason is None and call.bounds is not None:
            # Places of packed tokens have 30 bits.
            tokens, sequences = call.query.shape[0], call.samples
            if tokens + sequences * (call.window + 1) >= 1 << 30:
                return f"packs no {sequences} sequences with a window of {call.window} tokens"
        return reason

    def attend_packed(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.attend_packed`."""
        return self.attend_dense(as_sample(call), prepared)[0].transpose(0, 1)

    def attend_dense(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.attend_dense`."""
        places = None
        if call.bounds is not None:
            places = places_of(call.bounds, call.query.shape[2], call.window).int()
        seen: dict[str, Any] = {"places": places, "window": call.window, "key_mask": call.key_mask}
        options = {"is_causal": call.is_causal, "scale": call.factor}
        value = drop_keys(call.value, call.dropout_p)
        return fused_window(call.query, call.key, value, **seen, **options)


def _diagonal(call: Call) -> tuple[str | None, int]:
    """How kernels compute the blocks of a call, None = not at all; channels per own launch."""
    query, rows = call.query, call.block_rows
    # The tiles that packed sequences are cut into have a mask.
    is_masked = call.key_mask is not None or call.bounds is not None
    fits = blocks_fit(query, rows, False, is_masked)
    spans = blocks_span(query, is_masked)
    if call.kind == "lln_diag":
        heads = call.samples * query.shape[1]
        extras = call.key_mask is not None or call.mix_has_channels
        joins = blocks_join(query, heads, rows, call.is_causal, call.mix_learns, extras)
        # With blocks in the same kernel, the widest heads would have to read values in slices.
        is_wide = query.shape[-1] > WIDEST_WITH_BLOCKS and not call.is_causal
        if spans and not isinstance(call.mix, Tensor) and (is_wide or not (joins or fits)):
            # A watched call needs two operators, and wide values two launches.
            in_place = call.value.shape[-1] <= MAX_WIDTH and not is_watched(query)
            return "added" if in_place else "tiled", MAX_WIDTH
        if joins:
            return "joint", 0
    if fits:
        return "separate", widest_block_value(query, rows)
    return ("tiled", MAX_WIDTH) if spans else (None, 0)


class MomentKernel(KernelWay):
    """Statistics of queries and keys, and the α and β that follow: one pass over both."""

    name = "statistics kernel"
    kinds = ("moments", "temperatures")


class DecodeKernel(KernelWay):
    """A token is added to a summary and reads it, in one launch."""

    name = "decoding kernel"
    kinds = ("decode",)

    def why_not(self, call: Call) -> str | None:
        """See `Way.why_not`."""
        reason = super().why_not(call)
        if reason is not None or _fits_summary(call):
            return reason
        return (
            "decodes without gradients from a contiguous float32 summary whose heads are those of "
            "key or query"
        )

    def run(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.run`; the summary is changed in place."""
        summary = call.summary
        state = (summary.log_mass, summary.centroid)
        out, *state = fused_decode(*call.qkv, *state, call.alpha, summary.beta)
        summary.log_mass, summary.centroid = state
        return out


def _fits_summary(call: Call) -> bool:
    """Whether the summary fits the token, and nothing needs a gradient."""
    summary = call.summary
    log_mass, centroid = summary.log_mass, summary.centroid
    tensors = (*call.qkv, log_mass, centroid, call.alpha, summary.beta)
    if torch.is_grad_enabled() and any(
        isinstance(side, Tensor) and side.requires_grad for side in tensors
    ):
        return False
    heads = log_mass.shape[1]
    return (
        log_mass.dtype == torch.float32
        and log_mass.is_contiguous()
        and centroid.is_contiguous()
        and centroid.device == call.query.device
        and tuple(centroid.shape)
        == (call.query.shape[0], heads, call.query.shape[3], call.value.shape[3])
        and heads in (call.key.shape[1], call.query.shape[1])
        and heads_of(summary.beta) in (1, heads)
    )
