"""The device that a measurement runs on, and the commit that it is of."""

from __future__ import annotations

import torch

from lln.errors import InvalidInputError
from lln.testing.processor import PACKAGE, output_of


def check_device(device: str | None) -> str:
    """The device to use: the one asked for, else the GPU if there is one.

    Raises:
        InvalidInputError: If it is unknown or not available.
    """
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise InvalidInputError(f"--device must be cpu or cuda, got {device!r}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError("--device cuda needs a CUDA device; use --device cpu.")
    return device


def commit() -> str:
    """The commit of the checkout that `lln` is used from; empty for an installed one."""
    # Checked first, because an installed copy may lie inside another project's checkout.
    if not output_of("git", "ls-files", "--", str(PACKAGE / "__init__.py")):
        return ""
    return output_of("git", "rev-parse", "--verify", "HEAD")


def uncommitted(*places: str) -> bool | None:
    """Whether files there differ from the commit; None if no checkout says so.

    Args:
        places: Folders, or git's patterns; nothing = `lln`.
    """
    if not commit():
        return None
    found = output_of("git", "status", "--porcelain", "--", *(places or (str(PACKAGE),)))
    return bool(found)
