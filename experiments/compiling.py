"""Compiled training steps, and the same model as it is written for whatever looks at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Where `torch.nn.Module.compile` keeps what is called instead of `forward`.
_COMPILED = "_compiled_call_impl"


def compile_encoder(model: Any) -> None:
    """Compile the encoder of a host; batches of a training all have one shape."""
    model.encoder.compile(dynamic=False)


@contextmanager
def as_written(model: Any) -> Iterator[None]:
    """Run the encoder without its compiled form.

    Compiling once more, for batches without gradients, takes longer than it saves; and instruments
    cannot see inside.
    """
    encoder = model.encoder
    compiled = getattr(encoder, _COMPILED, None)
    setattr(encoder, _COMPILED, None)
    try:
        yield
    finally:
        setattr(encoder, _COMPILED, compiled)
