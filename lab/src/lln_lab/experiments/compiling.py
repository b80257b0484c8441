"""Compiled training steps, and the same model as it is written for whatever looks at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed

from lln.errors import InvalidInputError

# Where `torch.nn.Module.compile` keeps what is called instead of `forward`.
_COMPILED = "_compiled_call_impl"


def compile_encoder(model: Any) -> None:
    """Compile the encoder of a host; batches of a training all have one shape."""
    model.encoder.compile(dynamic=False)


def compile_layers(model: Any) -> None:
    """Compile the layers of a host one by one: equal ones share what the first one waited for."""
    for layer in model.encoder.layers:
        layer.compile(dynamic=False)


@contextmanager
def explained() -> Iterator[None]:
    """Say what to do where PyTorch cannot compile an encoder.

    Raises:
        InvalidInputError: One sentence in place of the compiler's pages.
    """
    try:
        yield
    except BackendCompilerFailed as error:
        inner = error.inner_exception
        reason = f"{type(inner).__name__}: {str(inner).strip().partition(chr(10))[0]}"
        raise InvalidInputError(
            f"torch {torch.__version__} cannot compile this model ({reason}); run it again without "
            "--compile."
        ) from error


@contextmanager
def as_written(model: Any) -> Iterator[None]:
    """Run a host without what is compiled of it.

    Compiling once more, for batches without gradients, takes longer than it saves; and instruments
    cannot see inside.
    """
    compiled = {
        module: call
        for module in model.modules()
        if (call := getattr(module, _COMPILED, None)) is not None
    }
    for module in compiled:
        setattr(module, _COMPILED, None)
    try:
        yield
    finally:
        for module, call in compiled.items():
            setattr(module, _COMPILED, call)
