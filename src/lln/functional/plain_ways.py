"""Plain PyTorch, and the N×N reference: the ways that every call can take."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lln.eager import packing
from lln.eager import run as eager
from lln.eager.key_attention import COPIED, FUSED, MASKED
from lln.eager.key_inference import can_fuse
from lln.eager.masked_keys import can_mask, mask_pays
from lln.functional.announcing import announce_call
from lln.functional.call import Call
from lln.functional.key_calls import attend_dense_keys, attend_packed_keys, complete
from lln.functional.one_by_one import no_tokens, one_by_one
from lln.functional.way import Prepared, Way
from lln.observers import is_observed
from lln.tracing import is_untraced_on_cpu

# How it goes about a call: `Prepared.how`.
WALK, IN_TURN = "from chunk to chunk", "one sequence after the other"


class Plain(Way):
    """PyTorch's own operations and nothing else: any device, any dtype, any transform."""

    name = "plain PyTorch"
    impl = "eager"
    kinds = ("lln", "diag", "lln_diag", "lln_keys", "moments", "temperatures", "decode")

    def prepare(self, call: Call) -> Prepared:
        """See `Way.prepare`."""
        how: tuple[str, ...] = ()
        if call.kind == "lln_keys":
            how = tuple(filter(None, [_reading(call)]))
        elif is_untraced_on_cpu(*call.qkv, call.alpha, call.beta, call.mix, call.bounds):
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
        """See `Way.run`; exact keys are chosen, too."""
        if call.kind == "decode":
            return call.summary.append(call.key, call.value).read(call.query, call.alpha)
        if call.kind != "lln_keys":
            return super().run(call, prepared)
        call = complete(call, self.impl)
        if is_observed():
            announce_call(call)
        if call.bounds is not None and call.query.shape[0] == 0:
            return no_tokens(call)
        attend = attend_dense_keys if call.bounds is None else attend_packed_keys
        return attend(call, self.impl, prepared.how[0] if prepared.how else COPIED)

    def attend_dense(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.attend_dense`."""
        walks = {} if call.kind == "diag" else {"walks": WALK in prepared.how}
        return attend_by_steps(call, eager, impl=self.impl, **walks)

    def attend_packed(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.attend_packed`."""
        if IN_TURN in prepared.how:
            return one_by_one(call, lambda own: self.attend_dense(own, prepared))
        names = ("alpha", "beta", "mix", "block_size", "scale", "dropout_p", "is_causal", "longest")
        options = {name: getattr(call, name) for name in names}
        return packing.attend(*call.qkv, call.bounds, **options)


def _reading(call: Call) -> str:
    """How plain PyTorch reads chosen keys; see `lln.eager.key_attention`."""
    sides = (*call.qkv, call.alpha, call.beta, call.offset)
    how: dict[str, Any] = {"is_causal": call.is_causal, "scale": call.factor}
    if call.bounds is None and call.group_size == 1 and can_mask(*sides, **how):
        chosen = call.keys if isinstance(call.keys, int) else call.keys.shape[-1]
        width = call.query.shape[-1]
        if mask_pays(call.query.shape[2], call.block_size + chosen, width):
            return MASKED
    return FUSED if can_fuse(*sides, **how) else COPIED


class Reference(Plain):
    """N×N matrices in float64: what every other way is compared with."""

    name = "the reference"
    impl = "reference"
    kinds = ("lln", "diag", "lln_diag", "lln_keys", "moments", "temperatures")
    is_automatic = False

    def prepare(self, call: Call) -> Prepared:
        """See `Way.prepare`."""
        how = (IN_TURN,) if call.bounds is not None and call.kind != "lln_keys" else ()
        return Prepared(self, call.block_size, how=how)

    def describe(self, prepared: Prepared) -> str:
        """A sentence on what computes a prepared call."""
        return f"{', '.join(('The N×N reference computes the call in float64', *prepared.how))}."


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
