"""The settings that every figure is measured with, and how results record them."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lln import __version__
from lln_lab.machine import commit, uncommitted

Results = dict[str, Any]
_Item = TypeVar("_Item")


def shipped_constants() -> dict[str, Any]:
    """The constants of moment matching that ship with the package."""
    return json.loads(resources.files("lln.matching").joinpath("constants.json").read_text("utf-8"))


@dataclass
class Setting:
    """How to measure.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        quick: A coarse and small version, a few seconds: to try the command out.
        progress: Called with the share that is done, from 0 to 1.
        constants: The content of ``constants.json``.
        data: Text to train on, a file or a folder; None = the standard library's source.
        work: File with the training state, from which an interrupted training resumes.
    """

    device: str = "cpu"
    quick: bool = False
    progress: Callable[[float], None] = lambda share: None
    constants: dict[str, Any] = field(default_factory=shipped_constants)
    data: Path | None = None
    work: Path | None = None

    def gaussians(self, draws: int, tokens: int, width: int, seed: int = 0) -> Tensor:
        """Unit queries and keys ``[2, 1, draws, N, D]`` in float64, the same on every device."""
        generator = torch.Generator("cpu").manual_seed(seed)
        shape = (2, 1, draws, tokens, width)
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(
            self.device
        )

    def steps(self, items: Sequence[_Item]) -> Iterator[_Item]:
        """Yields the items in order, and reports the share that is done after each."""
        for index, item in enumerate(items):
            yield item
            self.progress((index + 1) / len(items))

    def describe(self, name: str) -> Results:
        """Where the numbers come from: command, versions, device, commit."""
        words = ["lln", "figure", name, "--device", self.device, *(["--quick"] * self.quick)]
        # Only the name, because the path is specific to one machine.
        words += ["--data", self.data.resolve().name] if self.data is not None else []
        on_gpu = self.device.startswith("cuda")
        return {
            "command": " ".join(words),
            "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
            "lln": __version__,
            "torch": torch.__version__,
            "commit": commit() or None,
            "changed": uncommitted(),
        }
