"""A process that runs for long grows neither in memory nor in open files, and leaves no files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Bytes that a process may grow by once it is warm; measured were at most a million.
MOST_GROWTH = 16 << 20

MEASURED = """
import json, os, random, sys
from pathlib import Path

import torch

import lln

torch.set_num_threads(1)
torch.manual_seed(0)


def state():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = sum(len(names) for _, _, names in os.walk("."))
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "open": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "files": files,
    }

"""

CALLS = """
draw = random.Random(0)


def call():
    tokens, width = draw.randrange(1, 300), draw.choice((8, 16, 24, 64))
    heads, batch = draw.randrange(1, 5), draw.randrange(1, 3)
    dtype = draw.choice((torch.float32, torch.float32, torch.bfloat16, torch.float64))
    leaf = torch.randn(3, batch, heads, tokens, width, dtype=dtype)
    leaf.requires_grad_(draw.random() < 0.5)
    mask = torch.rand(batch, tokens) < 0.8 if draw.random() < 0.3 else None
    fixed = {"alpha": 1.5, "beta": 1.5}
    kind = draw.randrange(5)
    if kind == 0:
        out = lln.lln_attention(*leaf, key_mask=mask)
    elif kind == 1:
        out = lln.lln_attention(*leaf, **fixed, is_causal=True, key_mask=mask)
    elif kind == 2:
        out = lln.lln_diag_attention(*leaf, block_size=draw.choice((8, 16, 64)), key_mask=mask)
    elif kind == 3:
        out = lln.lln_keys_attention(*leaf, **fixed, keys=draw.choice((0, 8)), block_size=16)
    else:
        ends = sorted({0, tokens, draw.randrange(tokens)})
        packed = leaf[:, 0].transpose(1, 2)
        out = lln.lln_attention_varlen(*packed, torch.tensor(ends), **fixed)
    if leaf.requires_grad:
        out.float().sum().backward()


seen = []
for number in range(10_001):
    if number % 2_500 == 0:
        seen.append(state())
    call()
print(json.dumps(seen))
"""

DECODE = """
summary = lln.KeySummary.empty(2, 4, 64, 64, beta=1.5)
seen = []
with torch.no_grad():
    for number in range(20_001):
        if number % 5_000 == 0:
            seen.append(state())
        query, key, value = torch.randn(3, 2, 4, 1, 64)
        out = lln.decode_step(query, key, value, summary, alpha=1.5)
assert out.isfinite().all()
print(json.dumps(seen))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("work", [CALLS, DECODE], ids=["calls of changing shapes", "decoding"])
def test_a_long_run_stays_as_it_is(work, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", MEASURED + work],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=1000,
        check=False,
        env=os.environ | {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    cold, warm, *_, last = json.loads(done.stdout)
    assert last["memory"] - warm["memory"] < MOST_GROWTH, done.stdout
    assert last["files"] == cold["files"] == 0
    assert last["open"] == warm["open"]
    assert last["threads"] == warm["threads"]
