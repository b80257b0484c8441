"""Nothing of size N×N is held: memory of processes that measure long sequences."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from lln import instruments

def peak():
    # Not getrusage, which counts the process that started this one as well.
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

query, key = torch.randn(2, 1, 1, {tokens}, 64)
before = peak()
for name, kind in {cases!r}:
    found = getattr(instruments, name)(query, key, kind=kind)
    assert (found if isinstance(found, torch.Tensor) else found[0]).isfinite().all()
print(before, peak())
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux to tell a process's memory"
)


def memory(*cases, tokens=32768):
    """Bytes of a process before and at the peak of measuring."""
    script = SCRIPT.format(cases=cases, tokens=tokens)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    before, peak = map(int, done.stdout.split())
    return before, peak


def test_what_is_linear_takes_little_memory():
    """One N×N matrix in float64 would be 8 GiB."""
    before, peak = memory(
        ("spectral_gap", "lln"), ("variance", "lln"), ("entropy", "diag"), ("score_variance", "lln")
    )
    assert peak - before < 256 << 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "case",
    [
        ("entropy", "softmax"),
        ("entropy", "lln"),
        ("log_normality", "softmax"),
        ("log_normality", "lln_diag"),
        ("spectral_gap", "lln_diag"),
        ("temperature", "lln_diag"),
    ],
    ids="-".join,
)
def test_one_head_of_32768_tokens_stays_within_2_gib(case):
    _, peak = memory(case)
    assert peak < 2 << 30


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_iterated_gap_of_long_softmax_attention_never_forms_the_matrix():
    """P of 8,192 tokens is 512 MiB."""
    before, peak = memory(("spectral_gap", "softmax"), tokens=8192)
    assert peak - before < 300 << 20
