"""The way of the kernels for a window, sinks and pages (`lln.kernels.pages`)."""

from __future__ import annotations

from torch import Tensor

from lln.checks.bounds import read_bounds
from lln.checks.call import Call
from lln.eager.dropout import drop_keys
from lln.eager.padding import pad_sequences
from lln.functional.kernel_ways import KernelWay
from lln.functional.one_by_one import CHOICES
from lln.functional.page_calls import with_pages
from lln.functional.way import Prepared
from lln.kernels.launching.limits import MAX_GRID, why_no_pages
from lln.kernels.pages.page_ops import fused_pages
from lln.tracing import has_values, is_capturing

# Lengths of packed sequences that are padded to each other.
_ALIKE = 64


class PageKernels(KernelWay):
    """Pages are chosen and attended to by kernels; packed sequences are padded for them."""

    name = "kernels for pages"
    kinds = ("pages",)

    def why_not(self, call: Call) -> str | None:
        """See `Way.why_not`."""
        reason = super().why_not(call)
        if reason is not None:
            return reason
        if call.bounds is not None and (not has_values(call.bounds) or is_capturing()):
            return "reads cu_seqlens where pages are chosen, which nobody may wait for here"
        pages = call.keys.shape[-1] if isinstance(call.keys, Tensor) else call.keys
        axis = 1 if call.bounds is None else -2
        members = call.query.shape[axis] // max(call.key.shape[axis], 1)
        widths = (call.value.shape[-1], call.page_size, pages, members)
        reason = why_no_pages(call.query, *widths)
        if reason is None and call.choice_query is not None:
            # The width of other queries may differ.
            reason = why_no_pages(call.choice_query, 1, *widths[1:])
        return reason

    def attend_dense(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.attend_dense`."""
        call = with_pages(call, self.impl)
        value = drop_keys(call.value, call.dropout_p)
        return fused_pages(call.query, call.key, value, call.keys, scale=call.factor, **call.sight)

    def attend_packed(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.attend_packed`; waits for the values of the bounds."""
        assert call.bounds is not None
        heads = call.query.shape[1] + call.key.shape[1]
        bounds = read_bounds(call.bounds, call.query.shape[0])
        most = max(1, MAX_GRID // heads)
        padding = pad_sequences(bounds, _ALIKE, most, call.query.device)
        sides = {name: getattr(call, name) for name in ("query", "key", "value", *CHOICES)}
        sides = {name: padding.pad(side) for name, side in sides.items() if side is not None}
        outs = []
        for index, group in enumerate(padding.groups):
            own = {name: parts[index] for name, parts in sides.items()}
            dense = call.replace(**own, key_mask=group.mask, bounds=None, longest=None)
            outs.append(self.attend_dense(dense, prepared))
        return padding.unpad(outs)
