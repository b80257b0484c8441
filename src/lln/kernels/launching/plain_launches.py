"""Prepared launches as plain numbers, in the form that the driver takes them.

A compiled kernel of Triton is a function of the driver. Its parameters are those of the kernel that
are not ``constexpr`` (whole numbers equal to 1 and None count as such), in order, then two pointers
to scratch memory, which our kernels do not use. `lln.kernels.launcher` passes them without Triton.
Whatever is not understood here is not described: those calls stay with Triton's own launcher.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lln.kernels.launching.recipes import Recipe, Step

# Triton's name of a parameter's type → how `struct` packs it.
_PACKED = {
    **{"i1": "<?", "u1": "<?", "i8": "<b", "u8": "<B", "i16": "<h", "u16": "<H"},
    **{"i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q", "fp32": "<f", "fp64": "<d"},
}
# Places that hold numbers, and how they are written for a type; all others hold addresses.
_REAL, _WHOLE = {"fp32": "f", "fp64": "d"}, {"i32": "p", "i64": "p"}
_NUMBERS = {"alpha": _REAL, "beta": _REAL, "mix": _REAL, "seed": _WHOLE}
# What a kernel of ours never has, and the launcher does not know.
_ABSENT = (
    *("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid"),
    "tensordesc_meta",
)
# Pointers to scratch memory behind the parameters; older versions of Triton have the first only.
_SCRATCH = 2
_POINTER = 8

# (function, grid, threads, shared bytes, whether it follows without a pause, cells, fills): see
# ``launcher.cpp``.
PlainStep = tuple[int, tuple[int, ...], int, int, int, bytes, tuple[tuple[int, int, str], ...]]
# (bytes of the recipe's own memory, its offsets, steps).
PlainLaunches = tuple[int, tuple[int, ...], tuple[PlainStep, ...]]
# The sizes of a function's parameters in bytes; None if the driver does not say.
SizesOf = Callable[[int], "list[int] | None"]


def describe(recipe: Recipe, names: Sequence[str], sizes_of: SizesOf) -> PlainLaunches | None:
    """The launches of a recipe that has run; None where one of them is not understood.

    ``names`` are what a call brings, in the launcher's order, by the names in the kernels; the
    recipe's own memory stands behind it.
    """
    # A later place wins: memory of the recipe stands before what the call brings.
    places = {name: place for place, name in enumerate((*names, *recipe.offsets))}
    steps = []
    for step in recipe.steps:
        plain = _plain(step, places, sizes_of)
        if plain is None:
            return None
        steps.append(plain)
    return recipe.bytes, tuple(recipe.offsets.values()), tuple(steps)


def _plain(step: Step, places: Mapping[str, int], sizes_of: SizesOf) -> PlainStep | None:
    from lln.kernels.launching.recipes import Place

    compiled = step.compiled
    if compiled is None or not _is_usual(compiled.metadata):
        return None
    signature = compiled.src.signature
    if list(signature) != list(step.kernel.arg_names):
        return None
    cells: list[bytes] = []
    fills, sizes = [], []
    for kind, argument in zip(signature.values(), step.arguments, strict=True):
        is_place = isinstance(argument, Place)
        if kind == "constexpr":
            if is_place:
                return None
            continue
        if is_place:
            form = _form(str(argument), kind)
            if form is None:
                return None
            fills.append((len(cells), places[str(argument)], form))
            packed = bytes(_POINTER if kind.startswith("*") else struct.calcsize(_PACKED[kind]))
        elif kind in _PACKED:
            packed = struct.pack(_PACKED[kind], argument)
        else:
            return None
        sizes.append(len(packed))
        cells.append(packed.ljust(_POINTER, b"\0"))
    if not _agree(sizes, sizes_of(compiled.function)):
        return None
    cells += [bytes(_POINTER)] * _SCRATCH
    threads = 32 * compiled.metadata.num_warps
    launch = (compiled.function, step.whole_grid, threads, compiled.metadata.shared)
    return *launch, int(step.follows), b"".join(cells), tuple(fills)


def _is_usual(metadata: Any) -> bool:
    """Whether a plain launch is all that the kernel needs: no clusters, no scratch memory."""
    target = metadata.target
    if any(getattr(metadata, name, None) for name in _ABSENT):
        return False
    clusters = (*getattr(metadata, "cluster_dims", ()), getattr(metadata, "num_ctas", 1))
    return target.backend == "cuda" and target.warp_size == 32 and set(clusters) == {1}


def _form(name: str, kind: str) -> str | None:
    """How a place is written: ``"p"`` as it is, ``"f"`` and ``"d"`` as a float; None = unknown."""
    if name in _NUMBERS:
        return _NUMBERS[name].get(kind)
    return "p" if kind.startswith("*") else None


def _agree(sizes: list[int], found: list[int] | None) -> bool:
    """Whether the driver has the same parameters, and at most scratch pointers behind them."""
    if found is None:
        return True
    hidden = found[len(sizes) :]
    same = found[: len(sizes)] == sizes and set(hidden) <= {_POINTER}
    return same and len(hidden) <= _SCRATCH


def ask_driver(driver: ctypes.CDLL) -> SizesOf:
    """A function that asks the driver for the sizes of a kernel's parameters."""
    try:
        ask = driver.cuFuncGetParamInfo
    except AttributeError:  # A driver before CUDA 12.4
        return lambda function: None
    ask.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)

    def sizes_of(function: int) -> list[int] | None:
        found: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        while ask(function, len(found), ctypes.byref(offset), ctypes.byref(size)) == 0:
            found.append(size.value)
        return found or None

    return sizes_of
