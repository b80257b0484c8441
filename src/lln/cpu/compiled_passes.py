"""The compiled passes: where they are kept, how they are built, and when they are used.

The C++ in ``cpp`` computes what `lln.eager.few_passes`, `lln.eager.causal_walk` and
`lln.matching.moments` compute with PyTorch, head by head from cache. It is compiled only when the
user asks for it (``lln build-cpu``), into a folder of the user's cache; from then on calls on a CPU
use it (`lln.functional.compiled_calls`). Without it, or with ``LLN_CPU=torch``, PyTorch computes.

Dimension legend: B batch, H heads, n heads of all samples, T queries, S keys, D head width,
E value width.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import struct
import warnings
from collections.abc import Sequence
from ctypes import c_bool, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.errors import BackendUnavailableError, MemoryShortageError
from lln.native import cache_folder, compile_with, is_there, need_compiler, put_in_place, trusted

FOLDER = Path(__file__).with_name("cpp")
SOURCE = FOLDER / "passes.cpp"
# For this processor and no other: `library` tells them apart.
_COMPILE = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fopenmp")
_COMPILE += ("-fno-math-errno", "-fno-trapping-math", "-w", "-c")
# What Linux knows about the processor and about the libraries of this program.
_PROCESSOR, _LOADED = Path("/", "proc", "cpuinfo"), Path("/", "proc", "self", "maps")
# Numbers of pointers that they take.
_FUNCTIONS = {"lln_forward": 7, "lln_backward": 9, "lln_match": 4}
_FUNCTIONS |= {"lln_causal_forward": 8, "lln_causal_backward": 11}
# Channels and tokens of a block come in groups of as many.
GROUP = 16


class Blocks(NamedTuple):
    """The short range of a call.

    Attributes:
        size: b; compiled passes also know a last block that is shorter.
        scale: Factor of the scores.
        mix: Share of LLN in the output.
    """

    size: int
    scale: float
    mix: float


# The structures of the source as bytes, which are filled faster than those of ctypes.
# A call: seven sizes, where temperatures are, temperatures, blocks, and where the mask is.
_CALL = struct.Struct("@7q2P2fq2fP")
# A tensor: where it is, and its first three strides.
_SIDE = struct.Struct("@P3q")
# A curve: five coefficients, two limits and the floor.
_CURVE = struct.Struct("@8d")


class _Asked(NamedTuple):
    """What the library is asked for, and the tensors that it then reads."""

    call: bytes
    kept: tuple[Tensor | None, ...]


def packed_curve(coefficients: Sequence[float], limits: tuple[float, float], floor: float) -> bytes:
    """A curve of moment matching at one head width and number of keys.

    Args:
        coefficients: Of 1, u, …, u⁴.
        limits: Of p.
        floor: Smaller spreads are rounding noise.
    """
    return _CURVE.pack(*coefficients, *limits, floor)


def library() -> Path:
    """Where the library for this processor and this source is, or would be."""
    digest = hashlib.sha256()
    for path in sorted(FOLDER.iterdir()):
        digest.update(path.read_bytes())
    digest.update(" ".join((platform.machine(), _processor(), *_COMPILE)).encode())
    return cache_folder() / f"cpu-{digest.hexdigest()[:16]}.so"


@cache
def _processor() -> str:
    """What tells processors apart that do not know the same instructions."""
    try:
        lines = _PROCESSOR.read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    kept = ("flags", "Features", "model", "model name", "CPU part", "CPU variant")
    return "; ".join(sorted({line for line in lines if line.split("\t")[0].strip() in kept}))


def build() -> Path:
    """Compile the passes for this processor.

    Returns:
        The library.

    Raises:
        BackendUnavailableError: With the reason, and what to do about it.
    """
    if platform.system() != "Linux":
        raise BackendUnavailableError(
            f"the compiled passes are for Linux, not for {platform.system()}; everything runs "
            "without them."
        )
    return put_in_place(library(), _compile)


def _compile(target: Path) -> None:
    compiler, middle = need_compiler(), str(target.with_suffix(".o"))
    # Linked without OpenMP: PyTorch has its own, and two of them would not share their threads.
    steps = [[*_COMPILE, str(SOURCE), "-o", middle], ["-shared", middle, "-o", str(target)]]
    for words in steps:
        complaint = compile_with([compiler, *words])
        if complaint is not None:
            raise BackendUnavailableError(
                f"{compiler} cannot compile {SOURCE.name}: {complaint}; g++ 10 or later can."
            )


def is_switched_off() -> bool:
    """Whether the user wants PyTorch's own operations."""
    return os.environ.get("LLN_CPU") == "torch"


# None: not looked for yet. Otherwise the library, or why there is none.
_found: Any = None


def load() -> Any:
    """The library; None where it is not to be used."""
    global _found
    if _found is None:
        _found = why_absent() or _load()
    return None if isinstance(_found, str) else _found


def why_not() -> str | None:
    """Why PyTorch computes, in words; None if the compiled passes do."""
    load()
    return _found if isinstance(_found, str) else None


def why_absent() -> str | None:
    """The same, before the library is opened."""
    if is_switched_off():
        return "LLN_CPU=torch switches the compiled passes off"
    if not is_there(library):
        return "`lln build-cpu` compiles faster passes for this processor"
    return None


def _load() -> Any:
    path = library()
    try:
        return open_library(trusted(path))
    except (OSError, AttributeError) as error:
        reason = f"{path} cannot be used ({error})"
    warnings.warn(
        f"lln computes with PyTorch's operations, which take longer: {reason}; `lln build-cpu` "
        "compiles it again, LLN_CPU=torch does without it.",
        stacklevel=2,
    )
    return reason


def open_library(path: Path) -> Any:
    """The functions of a library, on PyTorch's threads."""
    ctypes.CDLL(_openmp(), mode=ctypes.RTLD_GLOBAL)
    found = ctypes.CDLL(str(path))
    for name, count in _FUNCTIONS.items():
        function = getattr(found, name)
        function.argtypes, function.restype = [c_void_p] * count, c_bool
    return found


def _openmp() -> str:
    """The OpenMP library that PyTorch uses."""
    for line in _LOADED.read_text("utf-8", "replace").splitlines():
        path = line.split(maxsplit=5)[-1]
        if re.fullmatch(r"lib(gomp|iomp5|omp)\b.*", Path(path).name):
            return path
    raise OSError("PyTorch has loaded no OpenMP library")


def employs_threads(heads: int) -> bool:
    """Whether most threads get work: a head is computed by one."""
    return 2 * heads >= torch.get_num_threads()


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    blocks: Blocks | None,
    key_mask: Tensor | None = None,
    keeps: bool = False,
    curves: Sequence[bytes] = (),
) -> tuple[Tensor, list[Tensor]]:
    """The output ``[B, H, T, E]``, and the summary that `backward` needs.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, H, S, D]``.
        value: ``[B, H, S, E]``.
        alpha: A number, or ``[n or 1, 1, 1]``.
        beta: Likewise.
        blocks: The short range; None = LLN alone.
        key_mask: bool ``[B, S]``, True = attend, with a key in every sample.
        keeps: Whether the summary is asked for.
        curves: If there are any, α and β are matched as by `match`, and written to what is given.
    """
    heads = query.shape[0] * query.shape[1]
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    summary = query.new_empty((heads, value.shape[-1] + 2, query.shape[-1]))
    call = _call(query, key, value, alpha, beta, blocks, key_mask, writes=bool(curves))
    _ask("lln_forward", call, (query, key, value), b"".join(curves) or None, out, summary)
    return out, [summary] if keeps else []


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    summary: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    blocks: Blocks | None,
    key_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; arguments as above."""
    made = [side.new_empty(side.shape) for side in (query, key, value)]
    call = _call(query, key, value, alpha, beta, blocks, key_mask)
    _ask("lln_backward", call, (query, key, value, gradient), summary, *made)
    return made[0], made[1], made[2]


def forward_causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
) -> list[Tensor]:
    """The output of causal LLN, what `backward_causal` needs, and every head's least normaliser.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, H, T, D]``.
        value: ``[B, H, T, E]``.
        alpha: A number, or ``[n or 1, 1, 1]``.
        beta: Likewise.
    """
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    norm, shift = (query.new_empty(query.shape[:-1]) for _ in range(2))
    least = query.new_empty(query.shape[0] * query.shape[1])
    call = _call(query, key, value, alpha, beta, None)
    _ask("lln_causal_forward", call, (query, key, value), out, norm, shift, least)
    return [out, norm, shift, least]


def backward_causal(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    norm: Tensor,
    shift: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; arguments as above."""
    made = [side.new_empty(side.shape) for side in (query, key, value)]
    call = _call(query, key, value, alpha, beta, None)
    _ask("lln_causal_backward", call, (query, key, value, gradient), out, norm, shift, *made)
    return made[0], made[1], made[2]


def match(
    query: Tensor, key: Tensor, curves: Sequence[bytes], key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """α and β by moment matching, ``[B, H, 1, 1]`` each.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, H, S, D]``.
        curves: One `packed_curve`, with a mask one for every sample.
        key_mask: bool ``[B, S]``, True = attend, with a key in every sample; if T = S it counts for
            the queries too.
    """
    alpha = query.new_empty((*query.shape[:2], 1, 1))
    beta = torch.empty_like(alpha)
    call = _call(query, key, key, alpha, beta, None, key_mask, writes=True)
    _ask("lln_match", call, (query, key), b"".join(curves))
    return alpha, beta


def _ask(name: str, asked: _Asked, sides: Sequence[Tensor], *others: Tensor | bytes | None) -> None:
    """Call a function of the library.

    Args:
        name: Which one.
        asked: What to compute.
        sides: ``[B, H, tokens, channels]``, which it reads wherever they lie in memory.
        others: Tensors without gaps, and the curves of matching, if there are any.

    Raises:
        MemoryShortageError: If it got no memory for its own work.
    """
    rows = [_rows(side) for side in sides]
    places = [_SIDE.pack(side.data_ptr(), *side.stride()[:3]) for side in rows]
    ends = [side.data_ptr() if isinstance(side, Tensor) else side for side in others]
    if not getattr(load(), name)(asked.call, *places, *ends):
        raise MemoryShortageError(
            "the compiled passes got no memory for their own work; use smaller batches or fewer "
            "threads (torch.set_num_threads)."
        )


def _rows(side: Tensor) -> Tensor:
    """The tensor, copied only if its memory does not hold its rows as they are."""
    return side if side.stride(-1) == 1 and not side.is_neg() else side.resolve_neg().contiguous()


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    blocks: Blocks | None,
    key_mask: Tensor | None = None,
    writes: bool = False,
) -> _Asked:
    """What the library is asked for; ``writes``: it finds the temperatures of all heads itself."""
    size, scale, mix = blocks or (0, 1.0, 1.0)
    # A block of all tokens is the largest that there is.
    size = min(size, -(-query.shape[2] // GROUP) * GROUP)
    alphas, one_alpha, kept_alpha = _temperature(alpha, writes)
    betas, one_beta, kept_beta = _temperature(beta, writes)
    mask = None if key_mask is None else key_mask.contiguous()
    call = _CALL.pack(
        *query.shape[:3],
        key.shape[2],
        query.shape[3],
        value.shape[3],
        torch.get_num_threads(),
        alphas,
        betas,
        one_alpha,
        one_beta,
        size,
        scale,
        mix,
        0 if mask is None else mask.data_ptr(),
    )
    return _Asked(call, (kept_alpha, kept_beta, mask))


def _temperature(given: float | Tensor, is_written: bool) -> tuple[int, float, Tensor | None]:
    """Where the temperatures of the heads are; else the one number of all; and what to keep."""
    if not isinstance(given, Tensor):
        return 0, float(given), None
    if given.numel() == 1 and not is_written:
        return 0, given.item(), None
    given = given.contiguous()
    return given.data_ptr(), 1.0, given
