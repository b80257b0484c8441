"""Plain PyTorch, and the N×N reference: the ways that every call can take."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lln.eager import packing
from lln.eager import run as eager
from lln.functional.announcing import announce_call
from lln.functional.call import Call
from lln.functional.key_calls import attend_dense_keys, attend_packed_keys, complete
from lln.functional.one_by_one import no_tokens, one_by_one
from lln.functional.way import Prepared, Way
from lln.observers import is_observed
from lln.tracing import is_untraced_on_cpu


class Plain(Way):
    """PyTorch's own operations and nothing else: any device, any dtype, any transform."""

    name = "plain PyTorch"
    impl = "eager"
    kinds = ("lln", "diag", "lln_diag", "lln_keys", "moments", "temperatures", "decode")

    def describe(self, prepared: Prepared) -> str:
        """A sentence on what computes a prepared call."""
        del prepared
        return "Plain PyTorch computes the call."

    def run(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.run`; exact keys are chosen, too."""
        if call.kind == "decode":
            return call.summary.append(call.key, call.value).read(call.query, call.alpha)
        if call.kind != "lln_keys":
            return super().run(call, prepared)
        call = complete(call, self.impl)
        if is_observed():
            announce_call(call)
        if call.bounds is None:
            return attend_dense_keys(call, self.impl)
        return no_tokens(call) if call.query.shape[0] == 0 else attend_packed_keys(call, self.impl)

    def attend_dense(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.attend_dense`."""
        del prepared
        return attend_by_steps(call, eager, impl=self.impl)

    def attend_packed(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.attend_packed`."""
        # On a CPU nobody waits to learn the lengths, and tiles of equal size take many times
        # longer.
        if is_untraced_on_cpu(*call.qkv, call.alpha, call.beta, call.mix, call.bounds):
            return one_by_one(call, lambda own: self.attend_dense(own, prepared))
        names = ("alpha", "beta", "mix", "block_size", "scale", "dropout_p", "is_causal", "longest")
        options = {name: getattr(call, name) for name in names}
        return packing.attend(*call.qkv, call.bounds, **options)


class Reference(Plain):
    """N×N matrices in float64: what every other way is compared with."""

    name = "the reference"
    impl = "reference"
    kinds = ("lln", "diag", "lln_diag", "lln_keys", "moments", "temperatures")
    is_automatic = False

    def describe(self, prepared: Prepared) -> str:
        """A sentence on what computes a prepared call."""
        del prepared
        return "The N×N reference computes the call in float64."

    def attend_packed(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.attend_packed`."""
        return one_by_one(call, lambda own: self.attend_dense(own, prepared))


def attend_by_steps(call: Call, engine: Any, **how: Any) -> Tensor:
    """A dense call without exact keys by `lln.eager.run` or `lln.cpu.run`.

    Args:
        call: The call.
        engine: One of the two modules.
        how: What it alone takes.
    """
    how |= {"is_causal": call.is_causal, "dropout_p": call.dropout_p}
    blocks = {"block_size": call.block_size, "scale": call.scale}
    if call.kind == "diag":
        out: Tensor = engine.short_range(*call.qkv, call.key_mask, **blocks, **how)
        return out
    lln = (*call.qkv, call.alpha, call.beta, call.key_mask)
    out = (
        engine.long_range(*lln, **how)
        if call.kind == "lln"
        else engine.both_ranges(*lln, call.mix, **blocks, **how)
    )
    return out
