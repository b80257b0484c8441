"""Fill fresh memory with NaN, so that a result read from it cannot pass by luck."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def poison_empty() -> Iterator[None]:
    """Make ``torch.empty``, ``empty_like``, ``empty_strided`` and ``new_empty`` return NaN."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def fill(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            if tensor.dtype == torch.uint8:
                # Bytes to be viewed as numbers later: all ones is a NaN in every float type.
                return tensor.fill_(255)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return fill

    names = ("empty", "empty_like", "empty_strided")
    patches = [mock.patch.object(torch, name, poisoned(getattr(torch, name))) for name in names]
    patches.append(mock.patch.object(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty)))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
