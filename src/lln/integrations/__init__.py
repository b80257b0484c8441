"""LLN attention in models of other libraries: Hugging Face transformers and timm.

Nothing here is imported by ``import lln``; each module imports its library when it is imported:

    from lln.integrations.transformers import register
    from lln.integrations.convert import convert
"""

from __future__ import annotations

import sys

from lln.errors import BackendUnavailableError

OLDEST_TRANSFORMERS = (5, 17)
NEEDS_TRANSFORMERS = "Hugging Face models need transformers; pip install 'lln[hf]'."


def too_old(version: str) -> BackendUnavailableError | None:
    """What to raise for that version of transformers; None if it is supported."""
    if tuple(int(part) for part in version.split(".")[:2]) >= OLDEST_TRANSFORMERS:
        return None
    oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
    return BackendUnavailableError(
        f"lln needs transformers {oldest} or newer, found {version}; pip install 'lln[hf]'."
    )


def unavailable(error: ImportError) -> BackendUnavailableError:
    """What to raise when transformers, or a part of it that is needed, cannot be imported."""
    found = getattr(sys.modules.get("transformers"), "__version__", None)
    old = None if found is None else too_old(found)
    if old is not None:
        return old
    if found is None and (error.name or "").split(".")[0] == "transformers":
        return BackendUnavailableError(NEEDS_TRANSFORMERS)
    reason = str(error).strip().splitlines()[0].rstrip(".")
    return BackendUnavailableError(
        f"transformers is installed but cannot be imported: {reason}; pip install --upgrade "
        "'lln[hf]'."
    )
