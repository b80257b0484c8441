"""No thread meets a vector function of MKL that was never called before."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

import lln
from lln.eager.first_calls import VECTOR_FUNCTIONS


def test_importing_calls_every_function_once(monkeypatch):
    """In a new process, on every machine: MKL is said to be there."""
    script = """
        import torch
        from torch.overrides import TorchFunctionMode

        seen = set()

        class Watch(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                if args and isinstance(args[0], torch.Tensor) and args[0].numel() == 1:
                    seen.add((function.__name__, str(args[0].dtype)))
                return function(*args, **(kwargs or {}))

        torch.backends.mkl.is_available = lambda: True
        with Watch():
            import lln
        print(*sorted(f"{name}:{dtype}" for name, dtype in seen))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    seen = set(done.stdout.split())
    for name in VECTOR_FUNCTIONS:
        assert {f"{name}:torch.float32", f"{name}:torch.float64"} <= seen


def test_every_vector_function_in_use_is_among_them():
    """Functions of MKL's vector mathematics that stand in the source are called on import."""
    # What PyTorch hands to MKL, written down apart from the list that is tested.
    vector = set(
        [
            "acos",
            "acosh",
            "asin",
            "asinh",
            "atan",
            "atanh",
            "cos",
            "cosh",
            "erf",
            "erfc",
            "erfinv",
            "exp",
            "expm1",
            "log",
            "log10",
            "log1p",
            "log2",
            "sin",
            "sinh",
            "sqrt",
            "tan",
            "tanh",
        ]
    )
    used = set()
    lab = Path(__file__).parents[2] / "lab/src"
    for path in (*Path(lln.__file__).parent.rglob("*.py"), *lab.rglob("*.py")):
        if "kernels" not in path.parts:
            used |= set(re.findall(r"\.([a-z0-9]+)_?\(", path.read_text("utf-8")))
    assert "exp" in used
    assert (used & vector) <= set(VECTOR_FUNCTIONS)


def test_first_calls_change_no_default():
    before = torch.get_default_dtype(), torch.get_num_threads()
    from lln.eager.first_calls import find_kernels

    find_kernels()
    assert before == (torch.get_default_dtype(), torch.get_num_threads())
