"""Checkpoints of a run on several ranks: complete or not there, and the same one for all ranks.

One rank writes, because every rank has the same weights. All ranks read the folder, which they
must share.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lln.errors import InvalidInputError
from lln.files import replacing
from lln.parallel.ranks import find_ranks

_NAME = "step-{:09d}.pt"


def save_checkpoint(folder: Path, step: int, content: dict[str, Any], keep: int = 2) -> Path:
    """Write a checkpoint in one step, then remove all but the newest ``keep``; on one rank only.

    Args:
        folder: Where checkpoints lie; made if missing.
        step: How many steps of training went into it.
        content: What `torch.load` reads with ``weights_only=True``: tensors, numbers, text.
        keep: More than one, because the newest may turn out to be damaged.
    """
    path = folder / _NAME.format(step)
    with replacing(path) as file:
        torch.save(content, file)
    # A process that was killed while it wrote leaves a file under another name.
    for left in folder.glob(".step-*"):
        left.unlink(missing_ok=True)
    for old in _newest_first(folder)[keep:]:
        old.unlink(missing_ok=True)
    return path


def load_newest(folder: Path, group: Any = None) -> tuple[int, dict[str, Any]] | None:
    """The newest checkpoint that the first rank can read, on every rank; None if there is none.

    Args:
        folder: That of `save_checkpoint`, the same for all ranks.
        group: As in `lln.parallel.lln_attention`; all its ranks must call this.

    Returns:
        Its step, and its content on the CPU.

    Warns:
        UserWarning: For every newer checkpoint that cannot be read.
    """
    ranks = find_ranks(group, "load_newest")
    found: tuple[int, dict[str, Any]] | None = None
    if ranks.own == 0:
        found = next(filter(None, map(_read, _newest_first(folder))), None)
    chosen: list[Any] = [None if found is None else found[0]]
    dist.broadcast_object_list(chosen, group=ranks.group(), group_src=0)
    if ranks.own == 0 or chosen[0] is None:
        return found
    path = folder / _NAME.format(chosen[0])
    found = _read(path) if path.exists() else None
    if found is None:
        raise InvalidInputError(
            f"rank 0 resumes from {str(path)!r}, which rank {ranks.own} cannot read; use a folder "
            "that all ranks share."
        )
    return found


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.pt"), reverse=True)


def _read(path: Path) -> tuple[int, dict[str, Any]] | None:
    """Step and content; None with a warning if the file is damaged."""
    try:
        return int(path.stem.removeprefix("step-")), torch.load(path, "cpu", weights_only=True)
    # Damage shows as whatever the first broken byte leads to.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        warnings.warn(f"{str(path)!r} is skipped, it cannot be read: {reason}", stacklevel=3)
        return None
