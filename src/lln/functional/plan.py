"""The plan of a call: what computes which part, decided once. Later code only executes it.

``impl="eager"``, ``"cpu"``, ``"triton"`` and ``"reference"`` hold for the whole attention or are
refused, and are never replaced: with ``"triton"`` every part runs in a kernel, with ``"cpu"`` in
compiled passes, except heads of causal calls whose rows lose their digits there. ``"auto"`` uses
the kernels on a GPU and compiled passes on a CPU where they can run, and plain PyTorch for the
rest. The statistics of ``matching="paper"`` are always computed in plain PyTorch.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

from torch import Tensor

from lln.checks.arguments import IMPLEMENTATIONS, check_impl
from lln.errors import BackendUnavailableError
from lln.functional import compiled_calls
from lln.functional.call import Call
from lln.kernels.launching.limits import (
    MAX_CHOSEN,
    MAX_WIDTH,
    blocks_fit,
    blocks_join,
    blocks_span,
    why_no_keys,
    why_unavailable,
    widest_block_value,
    widest_value,
)
from lln.matching.compiled_matching import can_match_compiled, pays_to_match_compiled
from lln.tracing import has_values, is_capturing, is_compiling, is_transformed

# Heads up to this width keep all channels of the values beside blocks.
WIDEST_BESIDE_BLOCKS = 128
# Most plans to keep, because planning again would slow every call.
MOST_PLANS = 4096


class Plan(NamedTuple):
    """How one call is computed; ``str(plan)`` says it in one sentence.

    Attributes:
        impl: ``"eager"``, ``"cpu"``, ``"triton"`` or ``"reference"``.
        diagonal: What computes the diagonal blocks: ``"joint"``, the LLN kernels in the same pass;
            ``"beside"``, a separate kernel; ``"added"``, kernels that go over blocks tile by tile
            and add them in place; ``"eager"``, ``"cpu"`` or ``"reference"``; None if there are no
            blocks.
        block_size: Tokens in a block; for kernels at most the length of the longest sequence.
        value_width: Channels of the values that one launch of LLN attention takes.
        block_value_width: The same for a launch of the separate kernel for blocks.
        selection: What chooses exact keys: ``"triton"`` or ``"eager"``; None if there are none.
        is_padded: Whether packed sequences are padded to dense samples for the kernels.
        matching: What matches α and β on a CPU: ``"eager"`` or ``"cpu"``; None = what computes the
            call, or nothing is matched.
        is_guarded: Whether compiled passes leave heads whose rows lose digits to PyTorch.
    """

    impl: str
    diagonal: str | None = None
    block_size: int = 0
    value_width: int = 0
    block_value_width: int = 0
    selection: str | None = None
    is_padded: bool = False
    matching: str | None = None
    is_guarded: bool = False

    def __str__(self) -> str:
        """One sentence."""
        if self.impl == "reference":
            return "The N×N reference computes the call in float64."
        if self.impl == "cpu":
            return self._say_compiled()
        if self.matching == "cpu":
            return "Plain PyTorch computes the call, and compiled passes match α and β."
        if self.impl == "eager":
            return "Plain PyTorch computes the call."
        blocks = f"blocks of {self.block_size} tokens"
        if self.selection is not None:
            padded = ", in sequences padded to similar lengths" if self.is_padded else ""
            return (
                "The fused kernels choose keys and attend to them, to "
                f"{blocks} and to the slots{padded}."
            )
        slices = f", up to {self.value_width or self.block_value_width} channels per launch"
        if self.diagonal is None:
            return f"The fused kernels compute LLN attention{slices}."
        if not self.value_width:
            return f"A fused kernel computes {blocks}{slices}."
        how = {
            "joint": f"and {blocks} in one pass",
            "beside": f"and another kernel {blocks}",
            "added": f"and others add {blocks}, tile by tile",
            "eager": f"and PyTorch {blocks}, which fit no tile of this chip",
        }
        return f"The fused kernels compute LLN attention {how[self.diagonal]}{slices}."

    def _say_compiled(self) -> str:
        rest = []
        if self.is_guarded:
            rest.append("heads whose rows lose their digits")
        if self.matching == "eager":
            rest.append("α and β")
        others = f", and plain PyTorch {' and '.join(rest)}" if rest else ""
        return f"Compiled passes compute the call{others}."


_plans: dict[tuple[object, ...], Plan] = {}


def plan_call(call: Call, impl: str) -> Plan:
    """Decide how a call is computed, from shapes, dtype, device and options.

    Args:
        call: The call; for kernels its α and β do not matter.
        impl: ``"auto"``, ``"eager"``, ``"cpu"``, ``"triton"`` or ``"reference"``.

    Raises:
        BackendUnavailableError: If ``"cpu"`` or ``"triton"`` was asked for and cannot run a part of
            the call.
    """
    query = call.query
    chosen = choose_implementation(impl, query)
    if call.kind == "lln_keys":
        return _plan_keys(call, impl, chosen)
    if chosen == "cpu" or (impl == "auto" and chosen == "eager"):
        return _plan_on_cpu(call, impl)
    if chosen != "triton":
        diagonal = chosen if call.block_size else None
        return Plan(chosen, diagonal, call.block_size)
    is_masked, is_packed = call.key_mask is not None, call.bounds is not None
    samples = call.bounds.shape[0] - 1 if call.bounds is not None else query.shape[0]
    heads, rows, learns, has_channels = samples * query.shape[1], 0, False, False
    has_gate = isinstance(call.mix, Tensor)
    if call.block_size:
        rows = min(call.block_size, _longest(call))
        learns, has_channels = call.mix_learns, call.mix_has_channels
    how = (call.kind, rows, call.is_causal, learns, has_channels, has_gate)
    how = (*how, is_masked, is_packed)
    if is_compiling():
        return _plan_kernels(query, heads, impl, *how)
    known = (query.device, query.dtype, query.shape[-1], heads, impl, *how)
    if known not in _plans:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        _plans[known] = _plan_kernels(query, heads, impl, *how)
    return _plans[known]


def _plan_on_cpu(call: Call, impl: str) -> Plan:
    """By compiled passes where they know the call, and under ``"auto"`` where they pay."""
    diagonal, matching = "eager" if call.block_size else None, None
    plain = Plan("eager", diagonal, call.block_size)
    unknown = compiled_calls.why_unknown(call)
    # Sizes come after that: a trace must not depend on them.
    if unknown is None and not all(side.numel() for side in call.qkv):
        return plain
    is_matched = call.kind != "diag" and call.alpha is None
    if is_matched and call.matching == "paper":
        matching = "eager"
    if impl == "cpu":
        if unknown is not None:
            raise BackendUnavailableError(_refusal(impl, unknown))
    elif unknown is not None or not compiled_calls.employs_threads(call):
        sides = (call.query, call.key, call.key_mask)
        is_compiled = is_matched and matching is None and call.bounds is None
        is_compiled = is_compiled and pays_to_match_compiled(*sides)
        return plain._replace(matching="cpu" if is_compiled else None)
    where = {"matching": matching, "is_guarded": call.is_causal and call.kind != "diag"}
    return Plan("cpu", diagonal and "cpu", call.block_size, **where)


def _refusal(impl: str, reason: str) -> str:
    return f"impl={impl!r} {reason}; use impl='eager', or impl='auto' to let lln choose."


def _plan_kernels(
    query: Tensor,
    heads: int,
    impl: str,
    kind: str,
    rows: int,
    is_causal: bool,
    mix_learns: bool,
    has_channels: bool,
    has_gate: bool,
    is_masked: bool,
    is_packed: bool,
) -> Plan:
    if kind == "lln":
        return Plan("triton", value_width=widest_value(query, heads, 0, is_causal, False))
    joint = (query, heads, rows, is_causal, mix_learns)
    joins = blocks_join(*joint, is_masked or has_channels)
    # The tiles that packed sequences are cut into have a mask.
    fits = blocks_fit(query, rows, False, is_masked or is_packed)
    spans = blocks_span(query, is_masked or is_packed)
    width = widest_value(query, heads, 0, is_causal, False)
    if kind == "lln_diag":
        # Beside blocks, the widest heads would have to read their values in slices.
        is_wide = query.shape[-1] > WIDEST_BESIDE_BLOCKS and not is_causal
        if spans and not has_gate and (is_wide or not (joins or fits)):
            return Plan("triton", "added", rows, width, MAX_WIDTH)
        if joins:
            return Plan("triton", "joint", rows, widest_value(*joint))
    if not (fits or spans) and impl == "triton":
        masked = " with a key mask" if is_masked else ""
        raise BackendUnavailableError(
            f"impl='triton' has no tile for blocks of {rows} tokens by {query.shape[-1]} "
            f"channels{masked} here; use smaller blocks, or impl='auto' to let lln choose."
        )
    own = widest_block_value(query, rows) if fits else MAX_WIDTH if spans else 0
    if kind == "diag":
        return Plan("triton", "beside", rows, 0, own) if own else Plan("eager", "eager", rows)
    return Plan("triton", "beside" if own else "eager", rows, width, own)


def _plan_keys(call: Call, impl: str, chosen: str) -> Plan:
    """The plan of a call with exact keys; the kernels take no causal calls."""
    plain = Plan("eager", None, call.block_size, selection="eager")
    if chosen == "cpu":
        raise BackendUnavailableError(_refusal(impl, "has no passes for exact keys"))
    if chosen != "triton":
        return plain._replace(impl=chosen)
    reason = None
    if call.is_causal:
        reason = "has no kernel for causal attention with exact keys"
    elif call.bounds is not None:
        reason = _why_not_padded(call.bounds, call.keys)
    if reason is None:
        width = call.value.shape[-1]
        # Chosen by query, keys are read beside whole blocks; indices are read group by group.
        by_query = call.select == "query" and isinstance(call.keys, int)
        group = call.block_size if by_query else call.group_size
        reason = why_no_keys(call.query, width, call.block_size, group)
    keys = call.keys
    if reason is None and isinstance(keys, int) and keys > MAX_CHOSEN:
        reason = f"chooses at most {MAX_CHOSEN} keys, not {keys}"
    if reason is None and call.select == "query" and isinstance(keys, int) and keys == 0:
        reason = "has no kernel for select='query' without keys"
    if reason is None:
        is_padded = call.bounds is not None
        sizes = (None, call.block_size)
        return Plan("triton", *sizes, selection="triton", is_padded=is_padded)
    if impl == "triton":
        raise BackendUnavailableError(_refusal(impl, reason))
    return plain


def _why_not_padded(bounds: Tensor, keys: object) -> str | None:
    """Why packed sequences cannot be padded for the kernels; None if they can."""
    if isinstance(keys, Tensor):
        return "takes no indices of keys in packed sequences"
    if not has_values(bounds):
        return "reads cu_seqlens where keys are exact, which a compiler or transform hides"
    if is_capturing():
        return "reads cu_seqlens where keys are exact, which a CUDA graph cannot wait for"
    return None


def choose_implementation(impl: str, query: Tensor) -> str:
    """``"eager"``, ``"cpu"``, ``"triton"`` or ``"reference"``: what was asked, if it can run here.

    Args:
        impl: ``"auto"``, which is ``"eager"`` on a CPU, or one of the others.
        query: Its device, dtype and head width decide.

    Raises:
        BackendUnavailableError: If ``"cpu"`` or ``"triton"`` was asked for and cannot run.
    """
    if impl not in IMPLEMENTATIONS:
        check_impl(impl)
    if impl in ("eager", "reference"):
        return impl
    if impl == "cpu":
        reason = compiled_calls.why_absent(query)
        if reason is not None:
            raise BackendUnavailableError(_refusal(impl, reason))
        return impl
    if impl == "auto" and query.device.type != "cuda":
        return "eager"
    reason = why_unavailable(query)
    if reason is None and not is_compiling() and is_transformed():
        # An operator whose gradient is written in Python has none under torch.func: grad would
        # fail, and jvp would silently give zeros.
        reason = "does not run under torch.func's transforms"
    if reason is None:
        return "triton"
    if impl == "triton":
        raise BackendUnavailableError(_refusal(impl, reason))
    # Not repeated: Python shows a warning from the same line only once.
    warnings.warn(
        f"lln runs in plain PyTorch on {query.device.type} here: impl='triton' {reason}.",
        stacklevel=3,
    )
    return "eager"


def choose_matching(
    impl: str, query: Tensor, key: Tensor, matching: str, key_mask: Tensor | None
) -> str:
    """What matches α and β apart from a call: as `choose_implementation`, or compiled passes.

    Raises:
        BackendUnavailableError: If ``"cpu"`` or ``"triton"`` was asked for and cannot run.
    """
    chosen = choose_implementation(impl, query)
    if matching == "paper":
        return chosen
    if chosen == "cpu" and not can_match_compiled(query, key, key_mask):
        raise BackendUnavailableError(_refusal(impl, "cannot match alpha and beta of this call"))
    pays = impl == "auto" and chosen == "eager" and pays_to_match_compiled(query, key, key_mask)
    return "cpu" if pays else chosen


def _longest(call: Call) -> int:
    """Tokens of the longest sequence, at least 1; the block size where that is unknown."""
    if call.bounds is None:
        return max(call.query.shape[2], 1)
    return call.block_size if call.longest is None else max(call.longest, 1)
