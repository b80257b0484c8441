"""Which implementation serves a call. An explicit request is met or refused, never replaced."""

from __future__ import annotations

import warnings

from torch import Tensor

from lln import checks
from lln.errors import BackendUnavailableError
from lln.kernels.sizes import why_unavailable
from lln.tracing import is_compiling, is_transformed


def choose_implementation(impl: str, query: Tensor) -> str:
    """``"eager"``, ``"triton"`` or ``"reference"``, from what was asked and what can run here.

    Args:
        impl: ``"auto"``, ``"eager"``, ``"triton"`` or ``"reference"``.
        query: Says where the call runs, and in what type and width.

    Raises:
        BackendUnavailableError: If ``"triton"`` was asked for and cannot run.
    """
    checks.check_impl(impl)
    if impl in ("eager", "reference"):
        return impl
    if impl == "auto" and query.device.type != "cuda":
        return "eager"
    reason = why_unavailable(query)
    if reason is None and not is_compiling() and is_transformed():
        # An operator whose gradient is written in Python has none under torch.func: grad would
        # fail, and jvp would give zeros without a word.
        reason = "does not run under torch.func's transforms"
    if reason is None:
        return "triton"
    if impl == "triton":
        raise BackendUnavailableError(
            f"impl='triton' {reason}; use impl='eager', or impl='auto' to let lln choose."
        )
    # Python shows a warning from one place once.
    warnings.warn(
        f"lln runs in plain PyTorch on {query.device.type} here: impl='triton' {reason}.",
        stacklevel=3,
    )
    return "eager"
