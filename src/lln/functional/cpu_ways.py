"""The ways of the compiled passes of a CPU (`lln.cpu`)."""

from __future__ import annotations

from torch import Tensor

from lln.cpu import compiled_passes
from lln.cpu import run as compiled
from lln.functional import compiled_calls
from lln.functional.announcing import announce_call
from lln.functional.call import Call
from lln.functional.match import with_temperatures
from lln.functional.one_by_one import no_tokens, one_by_one
from lln.functional.plain_ways import attend_by_steps
from lln.functional.prepared import Prepared
from lln.functional.way import Way
from lln.matching.compiled_matching import can_match_compiled
from lln.observers import is_observed


class CompiledPasses(Way):
    """LLN attention and its blocks, a head per thread."""

    name = "compiled passes"
    impl = "cpu"
    kinds = ("lln", "lln_diag", "diag", "lln_keys")

    def why_not(self, call: Call) -> str | None:
        """See `Way.why_not`."""
        return compiled_calls.why_unknown(call) or compiled_calls.why_blocks_apart(call)

    def pays(self, call: Call) -> bool:
        """Where most threads get a head; packed sequences are computed in turn."""
        samples = call.query.shape[0] if call.bounds is None else 1
        return compiled_passes.employs_threads(samples * call.query.shape[1])

    def prepare(self, call: Call) -> Prepared:
        """See `Way.prepare`."""
        rest: tuple[str, ...] = ()
        if call.is_causal:
            rest = ("heads whose rows lose their digits",)
        elif call.alpha is None and call.matching == "paper":
            rest = ("α and β",)
        return Prepared(self, call.block_size, rest=rest)

    def describe(self, prepared: Prepared) -> str:
        """A sentence on what computes a prepared call."""
        others = f", and plain PyTorch {' and '.join(prepared.rest)}" if prepared.rest else ""
        return f"Compiled passes compute the call{others}."

    def run(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.run`; the passes match α and β themselves where nobody wants to see them."""
        if call.alpha is None and (call.matching == "paper" or is_observed()):
            call = with_temperatures(call, self.impl)
        announce_call(call)
        if call.bounds is None:
            return self.attend_dense(call, prepared)
        if call.query.shape[0] == 0:
            return no_tokens(with_temperatures(call, self.impl))
        return one_by_one(call, lambda own: self.attend_dense(own, prepared))

    def attend_dense(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.attend_dense`."""
        del prepared
        return attend_by_steps(call, compiled, matching=call.matching)


class PassesBesidePlainBlocks(CompiledPasses):
    """LLN attention by compiled passes, and blocks that they do not know by PyTorch."""

    name = "compiled passes, blocks in plain PyTorch"
    kinds = ("lln_diag",)
    is_whole = False

    def why_not(self, call: Call) -> str | None:
        """See `Way.why_not`."""
        return compiled_calls.why_unknown(call)

    def prepare(self, call: Call) -> Prepared:
        """See `Way.prepare`."""
        made = super().prepare(call)
        return made._replace(rest=(*made.rest, f"blocks of {call.block_size} tokens"))

    def describe(self, prepared: Prepared) -> str:
        """A sentence on what computes a prepared call."""
        rest = " and ".join(prepared.rest)
        return f"Compiled passes compute LLN attention, and plain PyTorch {rest}."


class CompiledMatching(CompiledPasses):
    """α and β alone, where a module asks for them."""

    name = "compiled matching"
    kinds = ("temperatures",)

    def why_not(self, call: Call) -> str | None:
        """See `Way.why_not`."""
        absent = compiled_calls.why_absent(*call.qkv, call.key_mask)
        if absent is not None or call.matching == "paper":
            return absent
        if not can_match_compiled(call.query, call.key, call.key_mask):
            return "cannot match alpha and beta of this call"
        return None

    def pays(self, call: Call) -> bool:
        """Where the passes match, and most threads get a head."""
        return call.matching != "paper" and super().pays(call)


class PlainMoments(CompiledPasses):
    """Statistics of queries and keys: ``impl="cpu"`` leaves them to PyTorch."""

    name = "statistics beside compiled passes"
    kinds = ("moments",)
    is_automatic = False

    def why_not(self, call: Call) -> str | None:
        """See `Way.why_not`."""
        return compiled_calls.why_absent(call.query)
