"""Kernel launches, worked out once and repeated cheaply.

Triton looks at every argument of every launch to find the compiled kernel that fits: 0.1 ms for the
sixty arguments of ours, more than the kernels take. But calls with the same shapes, strides, types
and options launch the same kernels with the same numbers; only addresses, temperatures and seeds
differ. So the first call of a kind leaves a `Recipe`, and the next ones fill in its `Place`s and
hand the arguments straight to the compiled kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from lln.errors import BackendUnavailableError
from lln.kernels.tuning import Plan, cdiv, is_interpreted, overrides, smaller

# Beyond this many kinds of calls the oldest are forgotten: every length of a sequence is a kind.
MOST_RECIPES = 4096


class Place(str):
    """An argument that differs from call to call: the name of a tensor or a number."""

    __slots__ = ()


def places(names: str) -> list[Place]:
    """One `Place` for every word."""
    return [Place(name) for name in names.split()]


class Step:
    """One launch: a kernel, its grid, and all its arguments, some of them `Place`s."""

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: Sequence[object],
        constants: Mapping[str, object],
        warps: int,
    ) -> None:
        """Constants go by name; the kernel's other parameters come in order."""
        self.kernel, self.grid = kernel, grid
        self.arguments, self.warps = list(arguments), warps
        rest = kernel.arg_names[len(self.arguments) :]
        self.constants = {name: constants[name] for name in rest}
        self.fills = [
            (index, str(argument))
            for index, argument in enumerate(self.arguments)
            if isinstance(argument, Place)
        ]
        self.runner: Callable[..., None] | None = None

    def record(self, live: dict[str, Any]) -> None:
        """Launch through Triton, which compiles, and keep what it compiled."""
        arguments = self._filled(live)
        compiled = self.kernel[self.grid](*arguments, **self.constants, num_warps=self.warps)
        if not is_interpreted():
            self.runner = compiled[(*self.grid, 1, 1)[:3]]

    def repeat(self, live: dict[str, Any]) -> None:
        """Launch what was compiled."""
        if self.runner is None:
            self.record(live)
        else:
            self.runner(*self._filled(live), *self.constants.values())

    def _filled(self, live: dict[str, Any]) -> list[Any]:
        # A copy: the recipe must not keep anybody's tensors alive.
        arguments = self.arguments.copy()
        for index, name in self.fills:
            arguments[index] = live[name]
        return arguments


class Recipe:
    """The launches of one kind of call, and the room they need in between."""

    def __init__(self, steps: list[Step], room: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
        """Lay out the room.

        Args:
            steps: In order.
            room: Name → (shape, dtype) of every intermediate tensor.
        """
        self.steps, self.room = steps, room
        names = {name for step in steps for _, name in step.fills}
        self.names = sorted(names - room.keys())
        # Which of them are tensors; known when the recipe first runs.
        self.tensors: list[str] = []
        self.numbers: list[str] = []
        # One allocation for all: each costs more than filling in its addresses.
        self.offsets: dict[str, int] = {}
        self.bytes = 0
        for name, (shape, dtype) in room.items():
            self.offsets[name] = self.bytes
            self.bytes += cdiv(math.prod(shape) * dtype.itemsize, 256) * 256

    def run(self, live: dict[str, Any], device: torch.device, *, first: bool) -> None:
        """Launch every step on the device's current stream."""
        space = torch.empty(self.bytes, dtype=torch.uint8, device=device) if self.bytes else None
        if first or is_interpreted():
            self.tensors = [name for name in self.names if isinstance(live[name], Tensor)]
            self.numbers = [name for name in self.names if not isinstance(live[name], Tensor)]
            live = live | self._tensors(space)
            with _on(device):
                for step in self.steps:
                    step.record(live)
            return
        addresses: dict[str, Any] = {name: live[name].data_ptr() for name in self.tensors}
        for name in self.numbers:
            addresses[name] = live[name]
        if space is not None:
            begin = space.data_ptr()
            for name, offset in self.offsets.items():
                addresses[name] = begin + offset
        if device.index == torch.cuda.current_device():
            for step in self.steps:
                step.repeat(addresses)
            return
        with _on(device):
            for step in self.steps:
                step.repeat(addresses)

    def _tensors(self, space: Tensor | None) -> dict[str, Tensor]:
        """The room as tensors."""
        tensors = {}
        for name, (shape, dtype) in self.room.items():
            if space is not None:
                begin = self.offsets[name]
                part = space[begin : begin + math.prod(shape) * dtype.itemsize]
                tensors[name] = part.view(dtype).view(shape)
        return tensors


_recipes: dict[Hashable, Recipe] = {}
# How many times the plan of a kind of call had to shrink to fit the chip.
_shrunk: dict[Hashable, int] = {}


def follow(
    kind: Hashable,
    family: Hashable,
    live: dict[str, Any],
    device: torch.device,
    plan: Callable[[], Plan],
    write: Callable[[Plan], Recipe],
) -> None:
    """Run a call's recipe; write it first if this kind of call is new.

    Args:
        kind: Everything that decides the launches.
        family: What decides whether a plan fits the chip; kinds of one family shrink together.
        live: What fills the places.
        device: Where the tensors are.
        plan: Chooses the sizes.
        write: Makes the recipe for a plan.
    """
    if overrides:
        kind = (kind, tuple(overrides.items()))
    recipe = _recipes.get(kind)
    if recipe is not None:
        recipe.run(live, device, first=False)
        return
    chosen = plan()
    for _ in range(_shrunk.get(family, 0)):
        chosen = smaller(chosen) or chosen
    while True:
        recipe = write(chosen)
        try:
            recipe.run(live, device, first=True)
            break
        except OutOfResources as error:
            less = smaller(chosen)
            if less is None:
                raise BackendUnavailableError(
                    f"impl='triton' finds no tile that fits this GPU for head width "
                    f"{chosen.width}; use impl='eager'."
                ) from error
            chosen = less
            _shrunk[family] = _shrunk.get(family, 0) + 1
    if len(_recipes) >= MOST_RECIPES:
        del _recipes[next(iter(_recipes))]
    _recipes[kind] = recipe


def look_of(tensor: Tensor | None) -> Hashable:
    """What a launch can depend on beside the numbers inside: shape, strides, type, alignment."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16


def _on(device: torch.device) -> Any:
    """Launch on the tensors' device, whatever device is current."""
    return torch.cuda.device(device) if device.type == "cuda" else torch.inference_mode(False)
