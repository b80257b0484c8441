"""Memory grows linearly with the number of tokens; no N×N tensor exists anywhere.

Each case runs in its own process, which may not use more address space than a small multiple of its
inputs: at the largest length a matrix of N² float32 would take 64 GiB.
"""

import json
import math
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and sets RLIMIT_AS")

TOKENS = (1 << 14, 1 << 15, 1 << 17)
WIDTH = 32
ALLOWANCE = 3 << 30

CASES = {
    "lln": "lln.lln_attention(*dense)",
    "diag": "lln.lln_diag_attention(*dense, block_size=64)",
    "masked": "lln.lln_diag_attention(*dense, block_size=64, key_mask=torch.ones(1, n) > 0)",
    "causal": "lln.lln_attention(*dense, **fixed, is_causal=True)",
    "varlen": "lln.lln_diag_attention_varlen(*packed, torch.tensor([0, 5, n // 2, n]))",
    "causal_varlen": "lln.lln_attention_varlen("
    "*packed, torch.arange(0, n + 1, 512), **fixed, is_causal=True)",
}

SCRIPT = """
    import json, resource, torch, lln

    torch.set_num_threads(1)
    fixed = {{"alpha": 1.5, "beta": 1.5}}

    def status(name):
        with open("/proc/self/status") as file:
            return 1024 * int(next(line for line in file if line.startswith(name)).split()[1])

    def attend(n):
        leaf = torch.randn(3, n, {width}, requires_grad=True)
        dense, packed = leaf[:, None, None].unbind(), leaf[:, :, None].unbind()
        {case}.square().sum().backward()
        assert leaf.grad.isfinite().all()

    attend(1024)
    base = status("VmRSS")
    limit = status("VmSize") + {allowance}
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    peaks = []
    for n in {tokens}:
        attend(n)
        peaks.append(status("VmHWM") - base)
    print(json.dumps(peaks))
"""


def peaks_of(case):
    script = SCRIPT.format(case=case, tokens=TOKENS, width=WIDTH, allowance=ALLOWANCE)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-1500:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_peak_memory_is_linear_in_the_number_of_tokens(case):
    peaks = peaks_of(case)
    # The exponent of growth over a factor of 8; 2 for anything square.
    growth = math.log(peaks[-1] / peaks[0]) / math.log(TOKENS[-1] / TOKENS[0])
    assert growth < 1.1, peaks
    # In units of one of query, key, value: a fixed number of them, not one that grows.
    assert peaks[-1] / (4 * TOKENS[-1] * WIDTH) < 40, peaks


def test_the_limit_would_stop_a_square_matrix():
    with pytest.raises(AssertionError, match="DefaultCPUAllocator"):
        peaks_of("torch.softmax(dense[0][0, 0] @ dense[1][0, 0].mT, -1)")
