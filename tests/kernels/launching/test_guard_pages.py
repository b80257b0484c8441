"""Kernels read nothing outside of their inputs, not even what they then do not use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tests.kernels.common  # noqa: F401 (skips where no kernel can run)

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is protected by mprotect")
def test_inputs_at_the_edge_of_memory():
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.launching.guarded_calls"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    # A negative number is the signal that a read outside ends in; the last line says where.
    assert done.returncode == 0, (done.stdout[-200:], done.stderr[-2000:])
    assert done.stdout.splitlines()[-1] == "before tiled blocks 90"
