"""Which implementation serves a call. An explicit request is met or refused, never replaced."""

from __future__ import annotations

from torch import Tensor

from lln import checks
from lln.errors import BackendUnavailableError


def choose_implementation(impl: str, query: Tensor) -> str:
    """``"eager"`` or ``"reference"``, from what was asked and what can run here.

    Args:
        impl: ``"auto"``, ``"eager"``, ``"triton"`` or ``"reference"``.
        query: Says where the call runs.

    Raises:
        BackendUnavailableError: If ``"triton"`` was asked for and cannot run.
    """
    checks.check_impl(impl)
    if impl == "triton":
        raise BackendUnavailableError(
            f"impl='triton' is not available in this version of lln (query is on {query.device}); "
            "use impl='eager', or impl='auto' to take the fastest that can run."
        )
    return "eager" if impl == "auto" else impl
