"""What is tracing a call: a compiler, a transform, a dispatch mode or a CUDA graph.

All checks for tracing are here. They decide whether values may be read, and whether a kernel has to
be called as a registered operator.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

# Tensors that are what they say.
_PLAIN = (Tensor, torch.nn.Parameter)

# Whether ``torch.compile`` or ``torch.export`` is tracing the call.
is_compiling = torch.compiler.is_compiling


def always_holds(condition: bool) -> bool:
    """Whether a condition on sizes holds for all sizes that a trace is made for."""
    # Imported here, because it takes half a second.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def is_transformed() -> bool:
    """Whether a ``torch.func`` transform (vmap, grad, jvp) is active: values are then hidden."""
    return peek_interpreter_stack() is not None


def is_batched(tensor: Tensor) -> bool:
    """Whether it stands for many tensors: of a transform, or ``is_grads_batched=True``."""
    return is_transformed() or is_legacy_batchedtensor(tensor)


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a ``DTensor``, whose parts lie on several ranks."""
    if type(tensor) is Tensor:
        return False
    # Whoever has one has imported its module.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def has_values(tensor: Tensor) -> bool:
    """Whether the tensor holds real numbers that control flow may depend on; False in a trace."""
    if is_compiling() or is_transformed() or is_sharded(tensor):
        return False
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def values_are_readable(tensor: Tensor) -> bool:
    """Whether reading the tensor's values costs nothing and cannot break a trace."""
    if not has_values(tensor):
        return False
    return tensor.device.type == "cpu" or os.environ.get("LLN_DEBUG") == "1"


def is_watched(tensor: Tensor) -> bool:
    """Whether a compiler, a transform or a dispatch mode has to see an operator here."""
    return (
        is_compiling()
        or _len_torch_dispatch_stack() > 0
        or type(tensor) not in _PLAIN
        or is_transformed()
    )


def is_untraced(*sides: object) -> bool:
    """Whether all tensors among these are plain ones, and nobody traces the call."""
    if _is_traced():
        return False
    for side in sides:
        # Asking whether something is a tensor takes longer than asking whether it is a plain one.
        is_plain = type(side) in _PLAIN
        if not is_plain and isinstance(side, Tensor):
            return False
    return True


def is_untraced_on_cpu(*sides: object) -> bool:
    """Whether all tensors among these are plain ones on a CPU, and nobody traces the call."""
    if _is_traced():
        return False
    for side in sides:
        if isinstance(side, Tensor) and not (type(side) in _PLAIN and side.is_cpu):
            return False
    return True


def _is_traced() -> bool:
    """By a compiler, a mode of PyTorch in this thread, a transform or forward derivatives."""
    return (
        is_compiling()
        or _len_torch_dispatch_stack() > 0
        or _len_torch_function_stack() > 0
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def is_capturing() -> bool:
    """Whether calls are being recorded for a CUDA graph."""
    return not is_compiling() and (
        torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    )


def in_backward() -> bool:
    """Whether this thread is inside a backward pass, as when checkpointing repeats a forward."""
    return not is_compiling() and torch._C._current_graph_task_id() != -1
