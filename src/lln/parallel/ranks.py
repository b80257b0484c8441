"""The processes that share a sequence: a process group, or one axis of a device mesh.

The sequence is the concatenation of the ranks' shards, in the order of the ranks in the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lln.errors import InvalidInputError


class Ranks(NamedTuple):
    """The group of a call, as its collectives need it.

    Attributes:
        name: The name by which PyTorch finds the group.
        size: How many ranks there are.
        own: The place of this process among them.
    """

    name: str
    size: int
    own: int

    def group(self) -> dist.ProcessGroup:
        """The group itself."""
        return find_group(self.name)


class Bounds(NamedTuple):
    """Where the shards lie in the sequence.

    Attributes:
        starts: Position of the first token of every rank.
        ends: Position after its last one.
    """

    starts: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Bounds:
        """From the number of tokens of every rank."""
        ends = tuple(accumulate(lengths))
        return cls((0, *ends[:-1]), ends)

    @property
    def tokens(self) -> int:
        """Length of the whole sequence."""
        return self.ends[-1]

    @property
    def first_rank(self) -> int:
        """The rank that holds position 0; 0 if nobody has a token."""
        return next((rank for rank, end in enumerate(self.ends) if end > 0), 0)

    def cover(self, rank: int, start: int, end: int) -> tuple[int, int]:
        """The part of ``[start, end)`` that a rank holds, in its own positions; maybe empty."""
        low = min(max(start, self.starts[rank]), self.ends[rank])
        high = max(min(end, self.ends[rank]), low)
        return low - self.starts[rank], high - self.starts[rank]


def find_group(name: str) -> dist.ProcessGroup:
    """The group of a name: operators take no other arguments than tensors, numbers and strings."""
    return c10d._resolve_process_group(name)  # pyright: ignore[reportArgumentType]


def find_ranks(group: Any, operation: str) -> Ranks:
    """The ranks of a process group, of a mesh with one axis, or (None) of all processes.

    Raises:
        InvalidInputError: If there is no such group, or this process is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidInputError(
            f"{operation} needs processes that can talk to each other; call "
            "torch.distributed.init_process_group first."
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InvalidInputError(
                f"group must be one axis of a device mesh, got a mesh with {group.ndim} axes; "
                "give mesh['name of the axis']."
            )
        if group.get_coordinate() is None:
            raise InvalidInputError(_outside(operation))
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidInputError(_outside(operation))
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidInputError(
            "group must be a torch.distributed process group or one axis of a DeviceMesh, got "
            f"{type(group).__name__}."
        )
    return Ranks(group.group_name, group.size(), group.rank())


def _outside(operation: str) -> str:
    return (
        f"{operation} was called by rank {dist.get_rank()}, which is not in the group; call it on "
        "the ranks of the group only."
    )
