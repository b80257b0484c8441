"""What this machine can run, checked by running it."""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch

from lln.checks.call import Call
from lln.cpu import library
from lln.functional import ways
from lln.functional.dense import lln_diag_attention
from lln.kernels.launching import compiled_launcher
from lln.testing.failures import in_one_line
from lln.testing.processor import facts, version
from lln.testing.tolerances import budget, largest_error

OPTIONAL = {
    "triton": "fused GPU kernels",
    "transformers": "Hugging Face models",
    "matplotlib": "plots",
    "scipy": "spectral gaps of softmax attention",
}


def examine(echo: Callable[[str], object]) -> bool:
    """Report versions, processor and optional packages, and test attention on every device.

    Args:
        echo: Takes one line at a time.

    Returns:
        Whether every device gave the right numbers.
    """
    echo(f"python       {platform.python_version()} on {platform.system()} {platform.machine()}")
    echo(f"lln          {version('lln')}")
    for name, fact in facts().items():
        echo(f"{name:<12} {fact}")
    for package, use in OPTIONAL.items():
        found = version(package)
        extra = "" if found else f'pip install "lln[all]" adds {use}'
        echo(f"{package:<12} {found or 'not installed: ' + extra}")
    devices = ["cpu"]
    devices += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    are_right = all([_check(device, echo) for device in devices])
    reason = library.why_not()
    used = f"PyTorch's operations; {reason}"
    if reason is None:
        used = f"compiled, {library.load().instructions}; LLN_CPU=torch uses PyTorch"
    echo(f"{'cpu passes':<12} {used}")
    # Behind the checks: the launcher is loaded when a kernel is first repeated.
    reason = compiled_launcher.why_not()
    used = "compiled; LLN_LAUNCHER=python uses Python" if reason is None else f"Python; {reason}"
    echo(f"{'launcher':<12} {used}")
    return are_right


def _check(device: str, echo: Callable[[str], object]) -> bool:
    """Compare what runs on a device, in float32, with the float64 reference."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 1, 2, 208, 16, generator=generator)
    expected = lln_diag_attention(*inputs.double(), impl="reference")
    echo(f"{device:<12} a usual call (LLN + Diag, 12 heads of width 64): {_usual_plan(device)}")
    are_right = True
    query, key, value = inputs.to(device)
    call = Call("lln_diag", query, key, value, mix=0.5, block_size=64)
    for impl in ways.implementations("lln_diag"):
        if impl == "reference":
            continue
        try:
            reason = ways.why_not(call, impl)
            if reason is not None:
                echo(f"{device:<12} impl {impl!r} {reason}")
                continue
            found = lln_diag_attention(query, key, value, impl=impl).cpu()
        except Exception as error:  # Whatever a compiler or a driver raises is a finding.
            echo(f"{device:<12} FAILED: {in_one_line(error)}, impl {impl!r}")
            are_right = False
            continue
        error, allowed = largest_error(found, expected), budget(found, expected)
        verdict = "right" if error <= allowed else "WRONG"
        echo(f"{device:<12} {verdict}: error {error:.1e} (allowed {allowed:.1e}), impl {impl!r}")
        are_right = are_right and error <= allowed
    return are_right


def _usual_plan(device: str) -> str:
    """How `lln.lln_diag_attention` runs with ``impl="auto"``; nothing is computed."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    side = torch.empty((), dtype=dtype, device=device).expand(1, 12, 4096, 64)
    return str(ways.prepare(Call("lln_diag", side, side, side, mix=0.5, block_size=64), "auto"))
