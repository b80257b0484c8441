"""The way of the kernels for exact keys (`lln.kernels.keys`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lln.checks.call import Call
from lln.functional.kernel_ways import KernelWay
from lln.functional.padded_keys import attend_padded
from lln.functional.way import Prepared
from lln.kernels.keys.keys_ops import fused_keys
from lln.kernels.launching.limits import MAX_CHOSEN, why_no_keys
from lln.tracing import has_values, is_capturing


class KeyKernels(KernelWay):
    """Exact keys are chosen and attended to by kernels; packed sequences are padded for them."""

    name = "fused kernels for exact keys"
    kinds = ("lln_keys",)

    def why_not(self, call: Call) -> str | None:
        """See `Way.why_not`."""
        return super().why_not(call) or _why_not_taken(call)

    def prepare(self, call: Call) -> Prepared:
        """See `Way.prepare`."""
        padded = ("sequences padded to similar lengths",) if call.bounds is not None else ()
        return Prepared(self, call.block_size, how=padded)

    def describe(self, prepared: Prepared) -> str:
        """A sentence on what computes a prepared call."""
        padded = f", in {prepared.how[0]}" if prepared.how else ""
        return (
            "The fused kernels choose keys and attend to them, to "
            f"blocks of {prepared.block_size} tokens and to the slots{padded}."
        )

    def run(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.run`; padded sequences match and choose for themselves."""
        if call.bounds is not None and call.query.shape[0] > 0:
            return attend_padded(call, self.impl, lambda own: self.attend_dense(own, prepared))
        return super().run(call, prepared)

    def attend_dense(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.attend_dense`."""
        numbers = (call.alpha, call.beta, call.offset)
        form = {"block_size": call.block_size, "group_size": call.group_size}
        options: dict[str, Any] = {"key_mask": call.key_mask, "scale": call.scale, **form}
        return fused_keys(*call.qkv, *numbers, call.keys, **options)


def _why_not_taken(call: Call) -> str | None:
    """Why the kernels take no such blocks, groups and numbers of keys."""
    if call.bounds is not None:
        if isinstance(call.keys, Tensor):
            return "takes no indices of keys in packed sequences"
        if not has_values(call.bounds):
            return "reads cu_seqlens where keys are exact, which a compiler or transform hides"
        if is_capturing():
            return "reads cu_seqlens where keys are exact, which a CUDA graph cannot wait for"
    reason = why_no_keys(call.query, call.value.shape[-1], call.block_size, call.group_size)
    if reason is None and isinstance(call.keys, int) and call.keys > MAX_CHOSEN:
        return f"chooses at most {MAX_CHOSEN} keys, not {call.keys}"
    return reason
