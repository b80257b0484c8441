"""The compiled launcher for tests: built once, with a GPU's driver or one made of Python.

In the interpreter, `FakeDriver` stands where ``cuLaunchKernelEx`` is: it reads a launch's
parameters as the driver would, and runs the kernel with tensors at those addresses.
"""

import contextlib
import ctypes
import fcntl
import inspect
import os
import types

import pytest
import torch
from tests.kernels.common import ON_GPU
from torch import Tensor

from lln.cli import launcher_build
from lln.cpu.building import find_compiler
from lln.kernels.launching import compiled_launcher
from lln.kernels.launching.recipes import Place


class Attribute(ctypes.Structure):
    """``CUlaunchAttribute``."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(Config),
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)
# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
FOLLOWING = 6
STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
READ = {"i1": ctypes.c_bool, "i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
THE_STREAM = 0xABC0


def built(folder):
    """The library in a folder that all workers share; the first one builds it."""
    if find_compiler() is None:
        pytest.skip("the launcher is compiled by a C++ compiler, and there is none here")
    if ON_GPU and compiled_launcher.library().exists():
        # As `lln_lab.benchmarks.launcher` has built it.
        return compiled_launcher.library()
    os.environ["LLN_BUILD_FOLDER"] = str(folder)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = compiled_launcher.library()
        # On a GPU it is also timed; elsewhere compiling should not take long.
        return path if path.exists() else launcher_build.build(() if ON_GPU else ("-O0",))


def at(address, dtype):
    """A few numbers at an address, enough to tell the interpreter where and what."""
    there = (ctypes.c_char * 16).from_address(address)
    return torch.frombuffer(there, dtype=torch.uint8).view(dtype)


def signature_of(step, given):
    """The types of a kernel's parameters, as Triton names them."""
    parameters = inspect.signature(step.kernel.fn).parameters

    def kind(name, value):
        if "constexpr" in str(parameters[name].annotation) or value is None:
            return "constexpr"
        if isinstance(value, Tensor):
            return "*" + str(value.dtype)
        if isinstance(value, bool):
            return "i1"
        if isinstance(value, float):
            return "fp32"
        return "constexpr" if value == 1 else "i32" if -(2**31) <= value < 2**31 else "i64"

    return {name: kind(name, value) for name, value in zip(parameters, given, strict=True)}


class FakeDriver:
    """Runs what is launched in the interpreter, and keeps how it was launched."""

    def __init__(self):
        self.steps, self.seen, self.faults = {}, [], []
        self.status = 0
        self.callbacks = (LAUNCH(self.launch), STREAM(self.stream))
        self.addresses = (*map(compiled_launcher.address, self.callbacks), 0, 0, 0, 0)

    def enter(self, step, given):
        """A step that ran: what a compiled kernel tells about itself."""
        function = 0x1000 + 16 * len(self.steps)
        signature = signature_of(step, given)
        metadata = types.SimpleNamespace(
            num_warps=step.warps,
            num_ctas=1,
            shared=1000 + len(self.steps),
            target=types.SimpleNamespace(backend="cuda", warp_size=32),
        )
        source = types.SimpleNamespace(signature=signature)
        dtypes = [one.dtype if isinstance(one, Tensor) else None for one in given]
        self.steps[function] = step, list(signature.values()), dtypes, metadata
        return types.SimpleNamespace(metadata=metadata, src=source, function=function)

    def stream(self, device, out):
        out[0] = THE_STREAM
        return 0

    def launch(self, *given):
        try:
            self._launch(*given)
        except BaseException as error:  # ctypes would only print it.
            self.faults.append(error)
            return 1
        return self.status

    def _launch(self, config, function, parameters, extra):
        config = config.contents
        step, kinds, dtypes, metadata = self.steps[function]
        assert tuple(config.grid) == step.whole_grid
        assert tuple(config.block) == (32 * step.warps, 1, 1)
        assert (config.shared, config.stream, extra) == (metadata.shared, THE_STREAM, None)
        found = [config.attributes[place] for place in range(config.attribute_count)]
        assert [(one.id, one.value) for one in found] == [(FOLLOWING, 1)] * step.follows
        arguments, place = [], 0
        for kind, dtype, fixed in zip(kinds, dtypes, step.arguments, strict=True):
            if kind == "constexpr":
                arguments.append(fixed)
                continue
            where = parameters[place]
            place += 1
            if dtype is not None:
                arguments.append(at(ctypes.c_uint64.from_address(where).value, dtype))
                continue
            value = READ[kind].from_address(where).value
            if not isinstance(fixed, Place):
                assert value == (ctypes.c_float(fixed).value if kind == "fp32" else fixed)
            arguments.append(value)
        # Global and profile scratch memory.
        assert [ctypes.c_uint64.from_address(parameters[place + k]).value for k in (0, 1)] == [0, 0]
        self.seen.append(step.kernel.fn.__name__)
        with torch.no_grad():
            step.kernel[step.grid](*arguments, num_warps=step.warps)


@contextlib.contextmanager
def hooked(runtime, hook):
    """One launch hook of Triton."""
    before = runtime.launch_enter_hook
    runtime.launch_enter_hook = hook
    try:
        yield
    finally:
        runtime.launch_enter_hook = before
