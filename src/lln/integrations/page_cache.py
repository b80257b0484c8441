"""The cache of layers with pages: all keys and values, and what pages are chosen by.

Hugging Face's own cache serves these layers, too, but copies everything for every token, and
projects all keys anew. Here tensors have room to grow, which doubles when it is full, and a key is
projected once; the attention function finds the result at the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from lln.integrations.attached import AttachedHeads

# Tokens that there is room for at least.
_LEAST_ROOM = 64


class ChangesWhole:
    """Of a cache layer: what moves it or chooses among samples changes all that it keeps alike."""

    device: torch.device

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Put ``change(tensor)`` in the place of every tensor that is kept."""
        raise NotImplementedError

    def offload(self) -> None:
        """Move the past to the CPU."""
        self._change(lambda kept: kept.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the past back."""
        self._change(lambda kept: kept.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let every beam continue the past of the one it descends from."""
        self._change(lambda kept: kept.index_select(0, beam_idx.to(kept.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sample."""
        self._change(lambda kept: kept.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the samples at ``indices``."""
        self._change(lambda kept: kept[indices])


class PageCacheLayer(ChangesWhole, DynamicLayer):
    """One layer's past.

    Args:
        heads: What `convert` attached to the layer's attention module, if it did.
    """

    def __init__(self, heads: AttachedHeads | None = None) -> None:
        """Start with no past."""
        super().__init__()
        self.heads = heads
        self._rooms: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new keys and values in; returns all, the keys marked with their projections."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        new = [key_states, value_states]
        index = None
        if self.heads is not None and self.heads.index is not None:
            index = self.heads.index()
            new.append(index.of_keys(key_states))
        self._make_room(start, new)
        end = start + key_states.shape[2]
        for room, side in zip(self._rooms, new, strict=True):
            room[:, :, start:end] = side
        self._show(end)
        keys, *others = (room[:, :, :end] for room in self._rooms)
        if index is not None:
            keys.lln_index = others[1]  # pyright: ignore[reportAttributeAccessIssue]
        return keys, others[0]

    def reset(self) -> None:
        """Forget everything."""
        self._rooms = []
        self.keys = self.values = None
        self.is_initialized = False

    def size(self) -> int:
        """Bytes held."""
        return sum(room.numel() * room.element_size() for room in self._rooms)

    def _make_room(self, start: int, new: list[Tensor]) -> None:
        """Double the room where it is too small; training keeps what autograd has seen."""
        end, there = start + new[0].shape[2], self._rooms[0].shape[2] if self._rooms else 0
        is_tracked = any(side.requires_grad for side in (*new, *self._rooms))
        if end <= there and not is_tracked:
            return
        length = end if is_tracked else max(2 * end, _LEAST_ROOM)
        rooms = [side.new_empty(*side.shape[:2], length, side.shape[3]) for side in new]
        for room, old in zip(rooms, self._rooms, strict=False):
            room[:, :, :start] = old[:, :, :start]
        self._rooms = rooms

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        length = self.get_seq_length()
        self._rooms = [change(room) for room in self._rooms]
        self._show(length)

    def _show(self, length: int) -> None:
        """Let the base class see what is kept."""
        if self._rooms:
            self.keys, self.values = (room[:, :, :length] for room in self._rooms[:2])
