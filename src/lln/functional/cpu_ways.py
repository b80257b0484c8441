"""The ways of the compiled passes of a CPU (`lln.cpu`)."""

from __future__ import annotations

import torch
from torch import Tensor

from lln.checks.call import Call
from lln.cpu import compiled_passes, library
from lln.cpu import run as compiled
from lln.cpu.compiled_matching import can_match_compiled
from lln.eager import run as eager
from lln.functional.key_calls import complete, with_numbers
from lln.functional.match import with_temperatures
from lln.functional.one_by_one import no_tokens, one_by_one
from lln.functional.page_calls import with_pages
from lln.functional.way import Prepared, Way
from lln.observers import announce_call, is_observed
from lln.precision import accumulation_dtype
from lln.tracing import is_untraced_on_cpu


class CompiledPasses(Way):
    """LLN attention, blocks, or both; a head per thread."""

    name = "compiled passes"
    impl = "cpu"
    kinds = ("lln", "diag", "lln_diag", "window")

    def why_not(self, call: Call) -> str | None:
        """See `Way.why_not`."""
        reason = why_absent(*call.qkv, call.alpha, call.beta, call.key_mask, call.bounds, call.mix)
        if reason is not None:
            return reason
        if accumulation_dtype(call.query.dtype) != torch.float32:
            return f"computes in float32, not {call.query.dtype}"
        return None

    def pays(self, call: Call) -> bool:
        """Where most threads get a head; packed sequences are computed in turn."""
        samples = call.query.shape[0] if call.bounds is None else 1
        return compiled_passes.employs_threads(samples * call.query.shape[1])

    def prepare(self, call: Call) -> Prepared:
        """See `Way.prepare`."""
        rest: tuple[str, ...] = ()
        if not call.has_temperatures:
            rest = ()
        elif call.is_causal:
            rest = ("heads whose rows lose their digits",)
        elif call.alpha is None and call.matching == "paper":
            rest = ("α and β",)
        return Prepared(self, call.block_size, how=rest)

    def describe(self, prepared: Prepared) -> str:
        """A sentence on what computes a prepared call."""
        others = f", and plain PyTorch {' and '.join(prepared.how)}" if prepared.how else ""
        return f"Compiled passes compute the call{others}."

    def run(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.run`; the passes match α and β themselves where nobody wants to see them."""
        if call.matching == "paper" or is_observed():
            call = with_temperatures(call, self.impl)
        if is_observed():
            announce_call(call)
        if call.bounds is None:
            return self.attend_dense(call, prepared)
        if call.query.shape[0] == 0:
            return no_tokens(with_temperatures(call, self.impl))
        return one_by_one(call, lambda own: self.attend_dense(own, prepared))

    def attend_dense(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.attend_dense`."""
        del prepared
        if not all(side.numel() for side in call.qkv):
            # Nothing to pass over.
            return eager.attend_dense(with_temperatures(call, "eager"))
        return compiled.attend_dense(call)


class CompiledKeys(CompiledPasses):
    """Exact keys by group; a head per thread, without gradients also parts of heads."""

    name = "compiled exact keys"
    kinds = ("lln_keys",)

    def why_not(self, call: Call) -> str | None:
        """See `Way.why_not`."""
        reason = super().why_not(call) or why_absent(call.offset)
        if reason is not None:
            return reason
        if isinstance(call.keys, Tensor) and call.bounds is not None:
            return "takes no indices of keys in packed sequences"
        return None

    def pays(self, call: Call) -> bool:
        """Always: forward passes cut heads where there are fewer than threads."""
        del call
        return True

    def prepare(self, call: Call) -> Prepared:
        """See `Way.prepare`."""
        missing = (("α and β", call.alpha), ("the offset", call.offset))
        names = [name for name, given in missing if given is None]
        return Prepared(self, call.block_size, how=tuple(filter(None, [" and ".join(names)])))

    def run(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.run`; keys are chosen on the way where nobody wants to see them."""
        call = with_numbers(call, self.impl)
        if is_observed() or isinstance(call.keys, Tensor):
            known = complete(call, self.impl)
            if is_observed():
                announce_call(known)
            call = known if call.bounds is None else call
        if call.bounds is None:
            return self.attend_dense(call, prepared)
        if call.query.shape[0] == 0:
            return no_tokens(call)
        return one_by_one(call, lambda own: self.attend_dense(own, prepared))

    def attend_dense(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.attend_dense`."""
        del prepared
        if not all(side.numel() for side in call.qkv):
            # Nothing to pass over.
            return eager.attend_dense(complete(call, "eager"))
        return compiled.attend_keys(call)


class CompiledPages(CompiledPasses):
    """A window, sinks and pages, chosen on the way, without gradients; heads are cut into parts."""

    name = "compiled pages"
    kinds = ("pages",)

    def why_not(self, call: Call) -> str | None:
        """See `Way.why_not`."""
        choice = (call.choice_query, call.choice_key)
        reason = super().why_not(call) or why_absent(*choice)
        if reason is not None:
            return reason
        if torch.is_grad_enabled() and any(side.requires_grad for side in call.qkv):
            return "finds no gradients of attention to pages"
        if any(side is not None and side.dtype == torch.float64 for side in choice):
            return "chooses pages in float32, not torch.float64"
        return None

    def pays(self, call: Call) -> bool:
        """Always: heads are cut where there are fewer than threads."""
        del call
        return True

    def run(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.run`; pages are chosen on the way where nobody wants to see them."""
        if is_observed() and call.bounds is None:
            call = with_pages(call, self.impl)
        return super().run(call, prepared)

    def attend_dense(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.attend_dense`."""
        if not all(side.numel() for side in call.qkv):
            # Nothing to pass over.
            return eager.attend_dense(with_pages(call, "eager"))
        return compiled.attend_pages(call)


class CompiledMatching(CompiledPasses):
    """α and β alone, where a module asks for them."""

    name = "compiled matching"
    kinds = ("temperatures",)

    def why_not(self, call: Call) -> str | None:
        """See `Way.why_not`."""
        absent = why_absent(*call.qkv, call.key_mask)
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
        return why_absent(call.query)


def why_absent(*sides: object) -> str | None:
    """Why compiled passes compute nothing of these tensors, whatever the call; None if they can."""
    if not is_untraced_on_cpu(*sides):
        return "takes ordinary tensors on a CPU, outside compilers, transforms and dispatch modes"
    if library.load() is None:
        return f"has no compiled passes here: {library.why_not()}"
    return None
