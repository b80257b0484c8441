"""The compiled launcher: where it is kept, and when it is used.

``launcher.cpp`` does in C++ what `repeats` does in Python. It is compiled only when the
user asks for it (``lln build-launcher``), into a folder of the user's cache; from then on calls use
it. Without it, or with ``LLN_LAUNCHER=python``, everything runs in Python, with the same results.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import sysconfig
import warnings
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch

from lln import observers
from lln.checks.call import Call
from lln.kernels.launching import plain_launches
from lln.kernels.launching.build_folder import cache_folder, is_there, trusted
from lln.kernels.launching.sizes import overrides

SOURCE = Path(__file__).with_name("launcher.cpp")
# The name that the module's initialisation function carries.
_NAME = "lln_launcher"
# What the compiler is told (`lln.cli.launcher_build`).
OPTIONS = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w")
# Of the driver, in the order in which ``configure`` takes them, behind the stream.
_CONTEXT = ("cuCtxGetCurrent", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent")


def library() -> Path:
    """Where the library for this Python, this torch and this source is, or would be."""
    digest = hashlib.sha256(SOURCE.read_bytes())
    tag = str(sysconfig.get_config_var("SOABI"))
    digest.update(" ".join((torch.__version__, tag, platform.machine(), *OPTIONS)).encode())
    return cache_folder() / f"launcher-{digest.hexdigest()[:16]}.so"


def is_switched_off() -> bool:
    """Whether the user wants calls to be launched from Python."""
    return os.environ.get("LLN_LAUNCHER") == "python"


# None: not looked for yet. Otherwise the module, or why there is none.
_found: Any = None
# What the launcher could not take first; None = nothing so far.
_refused: str | None = None


def load(long_way: Callable[..., Any]) -> Any:
    """The module ``launcher.cpp``, ready for launches on a GPU; None where it is not to be used.

    ``long_way`` takes over the backward passes that it cannot launch.
    """
    global _found
    if _found is None:
        _found = why_absent() or _load(long_way)
    return loaded()


def loaded() -> Any:
    """The module, if it was loaded."""
    return None if isinstance(_found, str) else _found


def forget() -> None:
    """Drop the calls that the launcher knows, if it was loaded."""
    module = loaded()
    if module is not None:
        module.forget()


def why_not() -> str | None:
    """Why calls are launched from Python, in words; None if the compiled launcher is used."""
    if _found is None:
        return why_absent()
    if isinstance(_found, str):
        return _found
    return None if _refused is None else f"the compiled launcher {_refused}"


def refuse(reason: str) -> None:
    """Say once what the library cannot launch, so that launches stay with Python."""
    global _refused
    if _refused is None:
        _refused = reason
        warnings.warn(
            f"lln launches from Python, which takes longer: the compiled launcher {reason}; "
            "LLN_LAUNCHER=python does without it.",
            stacklevel=2,
        )


def why_absent() -> str | None:
    """The same, before the library is opened."""
    if is_switched_off():
        return "LLN_LAUNCHER=python switches the compiled launcher off"
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "the compiled launcher is for GPUs of NVIDIA"
    if not is_there(library):
        return "`lln build-launcher` compiles a faster launcher, once for this torch"
    return None


def _load(long_way: Callable[..., Any]) -> Any:
    path = library()
    try:
        module = open_library(trusted(path))
        return _connect(module, long_way) or module
    except Exception as error:  # Whatever a library can do wrong must not stop the call.
        reason = f"{path} cannot be used ({type(error).__name__}: {error})"
    warnings.warn(
        f"lln launches from Python, which takes longer: {reason}; `lln build-launcher` compiles it "
        "again, LLN_LAUNCHER=python does without it.",
        stacklevel=2,
    )
    return reason


def open_library(path: Path) -> Any:
    """The extension module in a file."""
    loader = ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    if spec is None:
        raise ImportError(f"{path} is not an extension module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


# How the driver's word about a kernel's parameters is asked for; see `plain_launches`.
sizes_of: plain_launches.SizesOf = lambda function: None  # noqa: E731


def _connect(module: Any, long_way: Callable[..., Any]) -> str | None:
    """Give the module the functions of the driver and of torch; why not, if one is missing."""
    global sizes_of
    from lln.kernels.launching import recipes

    if recipes.knobs is None:
        return "this version of Triton does not say whether launches are watched"
    driver = ctypes.CDLL("libcuda.so.1")
    of_torch = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
    stream = getattr(of_torch, "aoti_torch_get_current_cuda_stream", None)
    if stream is None:
        return "this version of torch does not tell the current stream"
    functions = (driver.cuLaunchKernelEx, stream, *(getattr(driver, name) for name in _CONTEXT))
    addresses = tuple(map(address, functions))
    connect(module, "cuda", addresses, recipes.knobs.runtime, long_way)
    sizes_of = plain_launches.ask_driver(driver)
    return None


def connect(
    module: Any,
    device: str,
    addresses: tuple[int, ...],
    runtime: Any,
    long_way: Callable[..., Any],
    call_type: type = Call,
) -> None:
    """Set up a module (`open_library`) for tensors on a kind of device.

    The addresses are those of ``cuLaunchKernelEx``, of the function that tells the current stream,
    and of `_CONTEXT`, where 0 = there is none. ``runtime`` has Triton's launch hooks, as
    ``triton.knobs.runtime``; for the long way see `load`. Of calls it reads the fields by their
    names.
    """
    watchers = (observers._observers, overrides, runtime)
    module.configure(device, addresses, *watchers, long_way, call_type)


def address(function: Any) -> int:
    """Where a function of a library is."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0
