"""Kernel launches, prepared once and repeated cheaply.

Triton inspects every argument of every launch to find the compiled kernel that fits: 0.1 ms for our
sixty arguments, more than the kernels take. But calls with the same shapes, strides, types and
options launch the same kernels with the same numbers; only addresses, temperatures and seeds
differ. So the first call of a kind leaves a `Recipe`, a list of launches. Later calls fill in its
`Place`s and pass the arguments directly to the compiled kernels, as Triton does in the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources

from lln.errors import BackendUnavailableError
from lln.kernels.launching.kernel_arguments import precision_of, strides_of
from lln.kernels.launching.limits import is_interpreted
from lln.kernels.launching.shapes import layout_of
from lln.kernels.launching.sizes import Sizes, choose_sizes, overrides, smaller
from lln.kernels.launching.stretches import Tile, cdiv
from lln.kernels.launching.triton_order import HAS_FOLLOWERS

try:
    from triton import knobs
except ImportError:  # Triton before 3.4
    knobs = None

# Beyond this many kinds of calls the oldest are dropped: every sequence length is another kind.
MOST_RECIPES = 4096


class Place(str):
    """An argument that differs from call to call: the name of a tensor or a number."""

    __slots__ = ()


class Step:
    """One launch: a kernel, its grid, and all its arguments, some of them `Place`s."""

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        values: Mapping[str, object],
        warps: int,
        registers: int = 0,
    ) -> None:
        """``values`` are by the kernel's parameter names; a parameter without one is a `Place`."""
        self.kernel, self.grid, self.warps = kernel, grid, warps
        # Whether it is made ready while the step before still runs.
        self.follows = False
        # How to compile it; the interpreter does not know the second.
        self.how: dict[str, Any] = {"num_warps": warps}
        if registers and not is_interpreted():
            self.how["maxnreg"] = registers
        values = {"FOLLOWS": False, **values}
        self.arguments = [
            values[name] if name in values else Place(name) for name in kernel.arg_names
        ]
        self.fills = [
            (index, str(argument))
            for index, argument in enumerate(self.arguments)
            if isinstance(argument, Place)
        ]
        self.whole_grid = (*grid, 1, 1)[:3]
        # What Triton compiled, and the two ways to launch it; set when the step first runs.
        self.compiled: Any = None
        self.runner: Any = None
        self.launch: Any = None
        self.code: tuple[object, ...] = ()

    def follow(self) -> None:
        """Be made ready while the step before still runs, if the kernel then waits for it."""
        if "FOLLOWS" in self.kernel.arg_names:
            self.arguments[self.kernel.arg_names.index("FOLLOWS")] = self.follows = True
            self.how["launch_pdl"] = True

    def record(self, runtime: dict[str, Any]) -> None:
        """Launch through Triton, which compiles, and keep what it compiled."""
        compiled = self.kernel[self.grid](*self._filled(runtime), **self.how)
        if not is_interpreted():
            self.compiled = compiled
            self.runner, self.launch = compiled[self.whole_grid], compiled.run
            # None: no launch metadata, no enter hook and no exit hook.
            self.code = (compiled.function, compiled.packed_metadata, None, None, None)

    def repeat(self, runtime: dict[str, Any], stream: int | None) -> None:
        """Launch what was compiled.

        Without a stream through Triton, which also calls launch hooks.
        """
        if stream is None:
            self.runner(*self._filled(runtime))
        else:
            self.launch(*self.whole_grid, stream, *self.code, *self._filled(runtime))

    def _filled(self, runtime: dict[str, Any]) -> list[Any]:
        # A copy, because the recipe must not keep the caller's tensors alive.
        arguments = self.arguments.copy()
        for index, name in self.fills:
            arguments[index] = runtime[name]
        return arguments


def over_tiles(
    kernel: Any, grid: tuple[int, ...], values: Mapping[str, object], tile: Tile, **own: object
) -> Step:
    """A launch of a kernel that goes over its tokens in tiles of these sizes."""
    sizes = {"BT": tile.tokens, "STAGES": tile.stages}
    return Step(kernel, grid, {**values, **sizes, **own}, tile.warps, tile.registers)


# Name → (shape, dtype) of every intermediate tensor.
Workspace = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Recipe:
    """The launches of one kind of call, and the workspace (temporary memory) they need."""

    def __init__(self, steps: list[Step], workspace: Workspace) -> None:
        """Lay out the workspace of launches in order.

        It is temporary; a tensor with the name of a call's argument takes precedence.
        """
        self.steps, self.workspace = steps, workspace
        names = {name for step in steps for _, name in step.fills}
        self.names = sorted(names - workspace.keys())
        # In the compiled launcher's form (`lln.kernels.lln.repeats`); False where it takes none.
        self.native: Any = None
        # Which of the names are tensors; set when the recipe first runs.
        self.tensors: list[str] = []
        self.numbers: list[str] = []
        # One allocation for all, because each one costs more than computing addresses.
        self.offsets: dict[str, int] = {}
        self.bytes = 0
        for name, (shape, dtype) in workspace.items():
            self.offsets[name] = self.bytes
            # What is empty has an address, too.
            self.bytes += max(cdiv(math.prod(shape) * dtype.itemsize, 256), 1) * 256

    def run(self, runtime: dict[str, Any], device: torch.device, *, first: bool) -> None:
        """Launch every step on the device's current stream."""
        if first or self.steps[0].runner is None:
            space = torch.empty(self.bytes, dtype=torch.uint8, device=device)
            self.tensors = [name for name in self.names if isinstance(runtime[name], Tensor)]
            self.numbers = [name for name in self.names if not isinstance(runtime[name], Tensor)]
            runtime = runtime | self._tensors(space)
            with on_device(device):
                if can_follow():
                    for step in self.steps[1:]:
                        step.follow()
                for step in self.steps:
                    step.record(runtime)
            return
        addresses: dict[str, Any] = {name: runtime[name].data_ptr() for name in self.tensors}
        for name in self.numbers:
            addresses[name] = runtime[name]
        stream = None if launches_are_watched() else current_stream(device)
        if device.index == torch.cuda.current_device():
            self.repeat(addresses, device, stream)
            return
        with on_device(device):
            self.repeat(addresses, device, stream)

    def repeat(self, addresses: dict[str, Any], device: torch.device, stream: int | None) -> None:
        """Launch once more what was compiled, on the current device.

        Addresses and numbers are by the names of the places, and get the workspace, too.
        """
        space = torch.empty(self.bytes, dtype=torch.uint8, device=device) if self.bytes else None
        if space is not None:
            begin = space.data_ptr()
            for name, offset in self.offsets.items():
                addresses[name] = begin + offset
        for step in self.steps:
            step.repeat(addresses, stream)

    def _tensors(self, space: Tensor) -> dict[str, Tensor]:
        """The workspace as tensors."""
        tensors = {}
        for name, (shape, dtype) in self.workspace.items():
            begin = self.offsets[name]
            part = space[begin : begin + math.prod(shape) * dtype.itemsize]
            tensors[name] = part.view(dtype).view(shape)
        return tensors


_recipes: dict[Hashable, Recipe] = {}
# How many times the sizes of a family of calls had to shrink to fit the chip.
_shrunk: dict[Hashable, int] = {}


def launch_cached(
    kind: Hashable,
    family: Hashable,
    runtime: dict[str, Any],
    device: torch.device,
    choose: Callable[[], Sizes],
    write: Callable[[Sizes], Recipe],
) -> None:
    """Run a call's recipe; write it first if this kind of call is new.

    The kind is everything that decides the launches, the family what decides whether sizes fit the
    chip: kinds of one family shrink together. ``choose`` chooses the sizes, ``write`` makes the
    recipe for them; ``runtime`` has the arguments by the names of the places.
    """

    def run_first() -> Recipe:
        chosen = choose()
        for _ in range(_shrunk.get(family, 0)):
            chosen = smaller(chosen) or chosen
        while True:
            recipe = write(chosen)
            try:
                recipe.run(runtime, device, first=True)
                return recipe
            except OutOfResources as error:
                less = smaller(chosen)
                if less is None:
                    raise BackendUnavailableError(
                        f"impl='triton' finds no tile that fits this GPU for head width "
                        f"{chosen.width}; use impl='eager'."
                    ) from error
                chosen = less
                _shrunk[family] = _shrunk.get(family, 0) + 1

    _run_recipe(kind, runtime, device, run_first)


def launch_heads(
    name: str,
    sides: Mapping[str, Tensor],
    runtime: Mapping[str, Any],
    options: tuple[Hashable, ...],
    family: tuple[Hashable, ...],
    write: Callable[[Sizes, dict[str, Any]], Recipe],
    block_size: int = 0,
) -> None:
    """The same for a pass over heads of queries, keys and values.

    ``sides`` are ``[B, heads, tokens, channels]`` by their names in the kernels, among them
    ``p_q``, ``p_k`` and ``p_v``. Options decide the launches besides how these lie in memory, the
    family decides whether sizes fit besides types and widths. ``write`` makes the recipe for sizes,
    from the arguments that calls of one kind share; the block size is that of `choose_sizes`.
    """
    query, key, value = (sides[side] for side in ("p_q", "p_k", "p_v"))
    (batch, heads, tokens, width), key_heads = query.shape, key.shape[1]

    def write_all(chosen: Sizes) -> Recipe:
        values = {
            "T": tokens,
            "H": heads,
            "HK": key_heads,
            "R": heads // key_heads,
            "D": width,
            "E": value.shape[3],
            "BD": chosen.width,
            "BE": chosen.value_width,
            "PRECISION": precision_of(query, chosen.width),
            **strides_of(False, **sides),
        }
        return write(chosen, values)

    launch_cached(
        (name, query.device, tuple([layout_of(side) for side in sides.values()]), options),
        (name, query.device, query.dtype, width, value.shape[3], family),
        {**sides, **runtime},
        query.device,
        lambda: choose_sizes(query, key, value, batch, key_heads, block_size),
        write_all,
    )


def launch_fixed(
    kind: Hashable, runtime: dict[str, Any], device: torch.device, write: Callable[[], Recipe]
) -> None:
    """The same where sizes are the same on every chip.

    ``kind`` need not say how the tensors in ``runtime`` lie in memory.
    """
    layouts = [layout_of(side) for side in runtime.values() if isinstance(side, Tensor)]

    def run_first() -> Recipe:
        recipe = write()
        recipe.run(runtime, device, first=True)
        return recipe

    _run_recipe((kind, device, tuple(layouts)), runtime, device, run_first)


def _run_recipe(
    kind: Hashable, runtime: dict[str, Any], device: torch.device, run_first: Callable[[], Recipe]
) -> None:
    """Run the recipe of this kind of call; make and keep it if the kind is new."""
    if overrides:
        kind = (kind, tuple(overrides.items()))
    recipe = _recipes.get(kind)
    if recipe is not None:
        recipe.run(runtime, device, first=False)
        return
    recipe = run_first()
    if len(_recipes) >= MOST_RECIPES:
        del _recipes[next(iter(_recipes))]
    _recipes[kind] = recipe


def recipe_of(kind: Hashable) -> Recipe | None:
    """What a call of this kind has left; None in the interpreter, which launches with tensors."""
    recipe = None if overrides else _recipes.get(kind)
    return recipe if recipe is not None and recipe.steps[0].launch is not None else None


def launches_are_watched() -> bool:
    """Whether a profiler has launch hooks, or this version of Triton does not tell."""
    if knobs is None:
        return True
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(getattr(hook, "calls", hook) for hook in hooks)


def can_follow() -> bool:
    """Whether a launch can be made ready while another runs, on the current device."""
    if not HAS_FOLLOWERS or is_interpreted():
        return False
    active: Any = driver.active
    target = active.get_current_target()
    return target.backend == "cuda" and target.arch >= 90


def current_stream(device: torch.device) -> int:
    """The device's current stream, as Triton's launches take it."""
    active: Any = driver.active
    return active.get_current_stream(device.index)


def on_device(device: torch.device) -> Any:
    """Launch on the tensors' device, whatever device is current."""
    return torch.cuda.device(device) if device.type == "cuda" else torch.inference_mode(False)
