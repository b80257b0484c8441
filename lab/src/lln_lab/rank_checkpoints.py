"""Checkpoints of a run on several ranks: complete or not there, and the same one for all ranks.

One rank writes, because every rank has the same weights. All ranks read the folder, which they
must share.
"""

from __future__ import annotations

import os
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lln import checks
from lln.errors import InvalidInputError, WriteError
from lln.files import replacing
from lln.parallel.collectives import named
from lln.parallel.ranks import find_ranks

_NAME = "step-{:09d}.pt"
_PATTERN = re.compile(r"step-(\d{9,})\.pt")


def save_checkpoint(
    folder: Path, step: int, content: dict[str, Any], keep: int = 2, *, required: bool = True
) -> Path | None:
    """Write a checkpoint in one step, then remove older ones; on one rank only.

    Kept are this one and the newest of those before it that can be read, ``keep`` together.
    Checkpoints of later steps stay, and so do files with other names.

    Args:
        folder: Where checkpoints lie; made if missing.
        step: How many steps of training went into it.
        content: What `torch.load` reads with ``weights_only=True``: tensors, numbers, text.
        keep: More than one, because the newest may turn out to be damaged.
        required: Whether a full disk is an error. False = a warning: training goes on, and the next
            call tries again.

    Returns:
        Where it was written; None if the disk did not take it.

    Raises:
        InvalidInputError: If it could not be read again; nothing is written then.
        WriteError: If the disk is full or not writable; the checkpoints in the folder are as they
            were.

    Warns:
        UserWarning: The same, with ``required=False``.
    """
    checks.check_count("step", step, 0)
    checks.check_count("keep", keep)
    path = folder / _NAME.format(step)
    # A process that was killed while it wrote leaves a file under another name, which takes room.
    for left in folder.glob(".step-*"):
        left.unlink(missing_ok=True)
    try:
        _write(path, content)
    except WriteError as error:
        if required:
            raise
        warnings.warn(f"training goes on without a checkpoint: {error}", stacklevel=2)
        return None
    older = [old for number, old in _newest_first(folder) if number < step]
    good = [old for old in older if _fault(old) is None][: keep - 1]
    for old in older:
        if old not in good:
            old.unlink(missing_ok=True)
    return path


def load_newest(folder: Path, group: Any = None) -> tuple[int, dict[str, Any]] | None:
    """The newest checkpoint that the first rank can read, on every rank; None if there is none.

    Args:
        folder: That of `save_checkpoint`, the same for all ranks.
        group: As in `lln.parallel.lln_attention`; all its ranks must call this.

    Returns:
        Its step, and its content on the CPU.

    Raises:
        InvalidInputError: If this rank cannot read the first rank's choice.
        PeerError: If another rank stops or does not come.

    Warns:
        UserWarning: For every newer checkpoint that cannot be read, and if ``torchrun`` may restart
            ranks but was not started so that they find each other again.
    """
    operation = "lln_lab.rank_checkpoints.load_newest"
    ranks = find_ranks(group, operation)
    found: tuple[int, dict[str, Any]] | None = None
    if ranks.own == 0:
        _warn_of_restarts()
        found = next(filter(None, (_read(*one) for one in _newest_first(folder))), None)
    chosen: list[Any] = [None if found is None else found[0]]
    with named(ranks.name, f"{operation}: agreeing on a checkpoint"):
        dist.broadcast_object_list(chosen, group=ranks.group(), group_src=0)
    if ranks.own == 0 or chosen[0] is None:
        return found
    path = folder / _NAME.format(chosen[0])
    found = _read(chosen[0], path) if path.exists() else None
    if found is None:
        raise InvalidInputError(
            f"rank 0 resumes from {str(path)!r}, which rank {ranks.own} cannot read; use a folder "
            "that all ranks share."
        )
    return found


def _warn_of_restarts() -> None:
    """The variable belongs to ``torchrun`` itself: here it is too late to set it."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        warnings.warn(
            "ranks that torchrun starts again may wait for the dead ones; set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun (pytorch#135712).",
            stacklevel=3,
        )


def _write(path: Path, content: dict[str, Any]) -> None:
    with replacing(path, check=_refuse_unreadable) as file:
        try:
            torch.save(content, file)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InvalidInputError(_unreadable(_first_line(error))) from error


def _newest_first(folder: Path) -> list[tuple[int, Path]]:
    """Steps and files of the checkpoints; what has another name is none."""
    named_files = ((_PATTERN.fullmatch(path.name), path) for path in folder.glob("step-*.pt"))
    return sorted(((int(name[1]), path) for name, path in named_files if name), reverse=True)


def _read(step: int, path: Path) -> tuple[int, dict[str, Any]] | None:
    """Step and content; None with a warning if the file is damaged."""
    try:
        return step, torch.load(path, "cpu", weights_only=True)
    # Damage shows as whatever the first broken byte leads to.
    except Exception as error:
        warnings.warn(
            f"{str(path)!r} is skipped, it cannot be read: {_first_line(error)}", stacklevel=3
        )
        return None


def _fault(path: Path) -> Exception | None:
    """Why a file cannot be read; None if it can."""
    fault = None
    # Without the numbers, which is quick; in full only where that does not work.
    for device in ("meta", "cpu"):
        try:
            torch.load(path, device, weights_only=True)
        except Exception as error:
            fault = error
        else:
            return None
    return fault


def _refuse_unreadable(path: Path) -> None:
    fault = _fault(path)
    if fault is not None:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        raise InvalidInputError(_unreadable(", ".join(found) or _first_line(fault))) from fault


def _unreadable(what: str) -> str:
    return (
        "a checkpoint may hold tensors, numbers, text, lists and dicts, which torch.load reads "
        f"with weights_only=True; save state_dict() of the rest instead (got {what})."
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(".")
