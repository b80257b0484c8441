"""Calls every vector function once, before several threads can make the first call at once.

Intel's MKL 2024.2, which PyTorch's x86 wheels contain, selects the kernel of a vector function
when it is first called. If two threads make that first call at once, one of them may get a kernel
of low accuracy for its part of that one call: `exp` is then off by 1e-4, and the next call is right
again (pytorch issue 188792). Calling each function with one number, in one thread, when the package
is imported avoids this.
"""

from __future__ import annotations

import torch

# The functions that PyTorch passes to MKL's vector library and that this package or models use.
VECTOR_FUNCTIONS = (
    "acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "expm1",
    "log", "log10", "log1p", "log2", "sin", "sinh", "cosh", "sqrt", "tan", "tanh",
)  # fmt: skip


def find_kernels() -> None:
    """Call every vector function once, with one number; takes a fifth of a millisecond."""
    if not torch.backends.mkl.is_available():
        return
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in VECTOR_FUNCTIONS:
            getattr(torch, name)(number)


find_kernels()
