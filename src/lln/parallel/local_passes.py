"""What a rank computes of its own tokens, by the fused kernels or in plain PyTorch.

Whichever it is, summaries have the accumulation dtype when they travel, so that ranks need not
choose alike: one without tokens has nothing to launch.

Dimension legend: B batch, H query heads, Hk key heads, SH summary heads, T this rank's queries, S
its keys, D head width, E value width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lln import checks
from lln.checks.call import Call
from lln.eager.infinity import as_nan
from lln.eager.run import join, widen
from lln.eager.summary import read_heads, summarise_heads
from lln.errors import BackendUnavailableError, InvalidInputError
from lln.functional import ways
from lln.kernels.blocks.block_ops import fused_blocks
from lln.kernels.launching.limits import (
    MAX_GRID,
    blocks_fit,
    is_crowded,
    widest_block_value,
    widest_value,
)
from lln.kernels.summaries.summary_ops import fused_read, fused_summary
from lln.parallel.agreement import Shards
from lln.precision import accumulation_dtype


class LocalPasses(NamedTuple):
    """How a rank computes.

    Attributes:
        width: Channels of the values per launch of LLN's kernels; 0 = plain PyTorch.
        block_width: The same for blocks on the diagonal.
    """

    width: int = 0
    block_width: int = 0

    def summarise(self, call: Call, beta: float | Tensor) -> tuple[Tensor, Tensor]:
        """Log-mass ``[B, SH, D]`` and centroid ``[B, SH, D, E]`` of this rank's keys."""
        key, value, mask = call.key, call.value, call.key_mask
        if self.width and key.shape[2]:
            return fused_summary(key, value, beta, mask, self.width)
        return summarise_heads(as_nan(key), value, beta, mask)

    def read(self, call: Call, alpha: float | Tensor, log_mass: Tensor, centroid: Tensor) -> Tensor:
        """``[B, H, T, E]``: this rank's queries read a summary.

        In the dtype of query by kernels, else in the accumulation dtype.
        """
        query, mask = call.query, call.key_mask
        if self.width and query.shape[2]:
            mask = mask if query.shape[2] == call.key.shape[2] else None
            return fused_read(query, alpha, log_mass, centroid, mask, self.width)
        query, *_ = widen(query, call.key, call.value, mask, 0.0)
        return read_heads(query, alpha, log_mass, centroid)

    def blocks(self, call: Call) -> Tensor:
        """``[B, H, T, E]`` in the dtype of query: blocks that all lie on their rank."""
        query = call.query
        return fused_blocks(
            query,
            call.key,
            call.value,
            key_mask=None,
            block_size=min(call.block_size, query.shape[2]),
            scale=call.factor,
            is_causal=False,
            value_width=self.block_width,
        )

    @staticmethod
    def join(long_range: Tensor, short_range: Tensor, mix: float | Tensor) -> Tensor:
        """``mix · long + (1 - mix) · short``, computed in the accumulation dtype."""
        if long_range.dtype == short_range.dtype and not isinstance(mix, Tensor):
            # One pass over both, which rounds once.
            return torch.lerp(short_range, long_range, float(mix))
        dtype = accumulation_dtype(long_range.dtype)
        return join(long_range.to(dtype), short_range.to(dtype), mix)


def check_local(call: Call, impl: str, operation: str) -> None:
    """Refuse implementations that cannot read the summaries of other ranks.

    Raises:
        InvalidInputError: If keys are indices.
        BackendUnavailableError: If there is no such implementation here.
    """
    if call.kind == "lln_keys":
        if isinstance(call.keys, Tensor):
            raise InvalidInputError(
                f"{operation} chooses the keys itself, got indices; give keys as a number."
            )
        checks.check_count("keys", call.keys, 0)
    checks.check_impl(impl)
    reason = None
    if impl in ("reference", "cpu"):
        reason = "cannot read the summaries of other ranks"
    elif impl == "triton" and call.is_causal:
        reason = "has no kernel for a causal sequence on several ranks"
    elif impl == "triton" and call.kind == "lln_keys":
        ways.prepare(call, impl)
        if is_crowded(call.query.shape[0] * call.query.shape[1]):
            reason = f"has no kernel for exact keys of more than {MAX_GRID:,} heads"
    elif impl == "triton":
        _takes_kernels(call, impl)
    if reason is not None:
        raise BackendUnavailableError(f"impl={impl!r} {reason}; use impl='auto' in {operation}.")


def takes_keys(call: Call, impl: str) -> bool:
    """Whether this rank's part of a checked call with exact keys runs in the kernels."""
    if is_crowded(call.query.shape[0] * call.query.shape[1]):
        return False
    return ways.prepare(call, impl).impl == "triton"


def _takes_kernels(call: Call, impl: str) -> bool:
    """Whether kernels summarise and read this rank's tokens."""
    return ways.prepare(call.replace(kind="lln", block_size=0), impl).impl == "triton"


def choose_passes(call: Call, impl: str, shards: Shards) -> LocalPasses:
    """What this rank computes by kernels.

    Raises:
        BackendUnavailableError: If ``impl="triton"`` was asked for and blocks have no kernel.
    """
    query, heads = call.query, call.query.shape[0] * call.query.shape[1]
    if call.is_causal or is_crowded(heads):
        return LocalPasses()
    if not _takes_kernels(call, impl):
        return LocalPasses()
    passes = LocalPasses(widest_value(query, heads, 0, False, False))
    size = call.block_size
    if not size:
        return passes
    starts, ends = shards.bounds
    crossed = any(start % size for start, end in zip(starts, ends, strict=True) if end > start)
    if not crossed and not shards.masked and blocks_fit(query, size, False, extras=False):
        return passes._replace(block_width=widest_block_value(query, size))
    if impl == "triton":
        raise BackendUnavailableError(
            f"impl='triton' has no kernel for blocks of {size} tokens that cross ranks, have a key "
            f"mask or fit no tile here; use impl='auto' in {shards.operation}."
        )
    return passes
