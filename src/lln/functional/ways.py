"""The one place that decides how a call runs: an ordered list of ways.

``impl="auto"`` takes the first way that can compute a call and pays there. Another value of
``impl`` names its way, which is taken or refused with the reason, and never replaced. Everything
that depends on shapes, types, devices and options is decided here; afterwards a way only guards
itself against the numbers in the tensors.
"""

from __future__ import annotations

import warnings
from typing import NoReturn

from lln.checks.arguments import IMPLEMENTATIONS, check_impl
from lln.checks.call import Call
from lln.errors import BackendUnavailableError
from lln.functional.cpu_ways import (
    CompiledKeys,
    CompiledMatching,
    CompiledPages,
    CompiledPasses,
    PlainMoments,
)
from lln.functional.kernel_ways import (
    DecodeKernel,
    Kernels,
    KernelsBesidePlainBlocks,
    MomentKernel,
    WindowKernel,
    why_no_kernels,
)
from lln.functional.key_ways import KeyKernels
from lln.functional.page_ways import PageKernels
from lln.functional.plain_ways import Plain
from lln.functional.reference_way import Reference
from lln.functional.softmax_way import Softmax
from lln.functional.way import Prepared, Way

WAYS: tuple[Way, ...] = (
    Softmax(),
    Kernels(),
    KernelsBesidePlainBlocks(),
    WindowKernel(),
    PageKernels(),
    KeyKernels(),
    MomentKernel(),
    DecodeKernel(),
    CompiledPasses(),
    CompiledKeys(),
    CompiledPages(),
    CompiledMatching(),
    PlainMoments(),
    Plain(),
    Reference(),
)

# What calls are called in the reason that nothing computes them.
CALLED = {"lln_keys": "exact keys", "decode": "single steps of decoding"}


def prepare(call: Call, impl: str) -> Prepared:
    """Decide how a checked call is computed, from shapes, dtypes, devices and options.

    Args:
        call: The call; kernels do not mind its α and β.
        impl: ``"auto"``, or what names a way.

    Raises:
        InvalidInputError: If ``impl`` is none of these.
        BackendUnavailableError: If the way that was asked for cannot compute the call.
    """
    if impl not in IMPLEMENTATIONS:
        check_impl(impl)
    way = choose(call, impl)
    if impl == "auto" and call.query.device.type == "cuda" and isinstance(way, Plain):
        reason = why_no_kernels(call.query)
        if reason is not None:
            # Not repeated: Python shows a warning from the same line only once.
            warnings.warn(
                f"lln runs in plain PyTorch on cuda here: impl='triton' {reason}.", stacklevel=3
            )
    return way.prepare(call)


def choose(call: Call, impl: str) -> Way:
    """The first way that serves a call; see `prepare`."""
    found = _first_way(call, impl)
    if isinstance(found, str):
        refuse(impl, found)
    return found


def why_not(call: Call, impl: str) -> str | None:
    """Why nothing that ``impl`` names computes a call, as the rest of a sentence; None: it does."""
    found = _first_way(call, impl)
    return found if isinstance(found, str) else None


def _first_way(call: Call, impl: str) -> Way | str:
    """The first way that serves a call, or the last reason against one."""
    reason = f"computes no {CALLED.get(call.kind, call.kind)}"
    for way in WAYS:
        if way.serves(call.kind, impl):
            found = way.why_not(call)
            if found is None and (impl != "auto" or way.pays(call)):
                return way
            reason = found or reason
    return reason


def implementations(kind: str) -> tuple[str, ...]:
    """The values of ``impl`` that name a way for calls of a kind, in the order of the list."""
    return tuple(dict.fromkeys(way.impl for way in WAYS if way.serves(kind, way.impl)))


def refuse(impl: str, reason: str) -> NoReturn:
    """Say why a call cannot run as asked, and what to do."""
    cure = "" if "; use " in reason else "; use impl='eager'"
    advice = f"{cure}, or impl='auto' to let lln choose."
    raise BackendUnavailableError(f"impl={impl!r} {reason}{advice}")
