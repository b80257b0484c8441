"""Plain PyTorch: the way that every call can take."""

from __future__ import annotations

from torch import Tensor

from lln.checks.call import Call
from lln.eager.packing import attend_packed, attend_packed_keys
from lln.eager.run import attend_dense
from lln.functional.one_by_one import one_by_one
from lln.functional.page_calls import with_pages
from lln.functional.way import ATTENTIONS, Prepared, Way
from lln.tracing import has_values, is_untraced_on_cpu

# How it goes about a call: `Prepared.how`.
WALK, IN_TURN = "from chunk to chunk", "one sequence after the other"


class Plain(Way):
    """PyTorch's own operations and nothing else: any device, any dtype, any transform."""

    name = "plain PyTorch"
    impl = "eager"
    kinds = (*ATTENTIONS, "moments", "temperatures", "decode")

    def why_not(self, call: Call) -> str | None:
        """See `Way.why_not`."""
        if call.kind == "pages" and call.bounds is not None and not has_values(call.bounds):
            return "reads cu_seqlens where pages are chosen, which a compiler or transform hides"
        return None

    def prepare(self, call: Call) -> Prepared:
        """See `Way.prepare`."""
        how: tuple[str, ...] = ()
        if call.kind == "pages":
            how = () if call.bounds is None else (IN_TURN,)
        elif call.kind not in ("window", "lln_keys") and is_untraced_on_cpu(
            *call.qkv, call.alpha, call.beta, call.mix, call.bounds
        ):
            # On a CPU nobody waits to learn the lengths, and tiles of equal size take many times
            # longer.
            how = (IN_TURN,) if call.bounds is not None else ()
            if call.is_causal and call.kind != "diag" and is_untraced_on_cpu(call.key_mask):
                how = (*how, WALK)
        return Prepared(self, call.block_size, how=how)

    def describe(self, prepared: Prepared) -> str:
        """A sentence on what computes a prepared call."""
        return f"{', '.join(('Plain PyTorch computes the call', *prepared.how))}."

    def run(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.run`; a token is added to a summary, too."""
        if call.kind == "decode":
            return call.summary.append(call.key, call.value).read(call.query, call.alpha)
        return super().run(call, prepared)

    def attend_dense(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.attend_dense`."""
        if call.kind == "pages":
            call = with_pages(call, self.impl)
        return attend_dense(call, walks=WALK in prepared.how)

    def attend_packed(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.attend_packed`."""
        if IN_TURN in prepared.how:
            return one_by_one(call, lambda own: self.attend_dense(own, prepared))
        return attend_packed_keys(call) if call.kind == "lln_keys" else attend_packed(call)
