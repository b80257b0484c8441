"""Training by examples/context_parallel.py goes on after failures as if there had been none."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lab.tests.parallel.small_training import train
from tests.integrations.test_examples import EXAMPLES, load
from tests.parallel.workers import server
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lln.errors import WriteError

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "tokens": 128}
STEPS = 6
# Long enough to be interrupted.
MANY = 60
SECONDS = 120
# Otherwise processes that start again may find the addresses of the dead ones (pytorch#135712).
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def arguments(**numbers):
    numbers = SIZES | {"intermediate_size": 8, "batch": 2, "steps": STEPS, "every": 2} | numbers
    return [word for name, number in numbers.items() for word in (f"--{name}", str(number))]


@pytest.fixture
def hooks():
    """What the example and torch.distributed hook into the process goes after the test."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers, hook = [(number, signal.getsignal(number)) for number in numbers], sys.excepthook
    yield
    for number, handler in handlers:
        signal.signal(number, handler)
    sys.excepthook = hook


@pytest.fixture
def example(hooks):
    return load("context_parallel")


def checkpoints(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_damaged_checkpoint_is_skipped(example, tmp_path):
    undisturbed = example.main(arguments())
    assert list(undisturbed) == list(range(1, STEPS + 1))
    early = example.main(arguments(steps=4, out=tmp_path))
    assert checkpoints(tmp_path) == ["step-000000002.pt", "step-000000004.pt"]
    newest = tmp_path / "step-000000004.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    (tmp_path / ".step-000000005.pt.half").write_bytes(b"left by a process that was killed")
    with pytest.warns(UserWarning, match=r"step-000000004.pt' is skipped, it cannot be read"):
        late = example.main(arguments(out=tmp_path))
    assert list(late) == [3, 4, 5, 6]
    assert early | late == undisturbed
    assert checkpoints(tmp_path) == ["step-000000004.pt", "step-000000006.pt"]
    assert example.main(arguments(out=tmp_path)) == {}


def test_sigterm_leaves_a_checkpoint(example, tmp_path):
    undisturbed = example.main(arguments())
    real = example.batch_of

    def interrupted(options, step):
        if step == 3:
            signal.raise_signal(signal.SIGTERM)
        return real(options, step)

    example.batch_of = interrupted
    early = example.main(arguments(out=tmp_path))
    assert list(early) == [1, 2, 3]
    example.batch_of = real
    late = example.main(arguments(out=tmp_path))
    assert list(late) == [4, 5, 6]
    assert early | late == undisturbed


def test_a_full_disk(example, tmp_path, monkeypatch):
    """Training goes on, and saves again once there is room; only the last one must be written."""
    undisturbed = example.main(arguments())
    real = torch.save
    full = {4}

    def save(content, file):
        if int(content["optimizer"]["state"][0]["step"]) not in full:
            return real(content, file)
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", save)
    with pytest.warns(
        UserWarning, match=r"training goes on .*step-000000004.pt' cannot be written"
    ):
        assert example.main(arguments(out=tmp_path)) == undisturbed
    assert checkpoints(tmp_path) == ["step-000000002.pt", "step-000000006.pt"]
    full.add(8)
    with pytest.raises(WriteError, match=r"step-000000008.pt' cannot be written: No space left"):
        example.main(arguments(out=tmp_path, steps=8))
    torch.distributed.destroy_process_group()
    assert checkpoints(tmp_path) == ["step-000000002.pt", "step-000000006.pt"]


@contextmanager
def launched(folder):
    """The example under torchrun, by two processes."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += ["--max-restarts", "1", str(EXAMPLES / "context_parallel.py")]
    words += arguments(steps=MANY, every=5, out=folder)
    with subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **NEW_STORE},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def process_of(rank, torchrun):
    """The number of the process that torchrun started for a rank."""
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    for number in children:
        if f"\0RANK={rank}\0" in Path(f"/proc/{number}/environ").read_text():
            return int(number)
    raise AssertionError(f"no process of rank {rank} among {children}")


def losses_until(process, step=None):
    """The losses by step that a run prints, until it prints this one, or to its end."""
    found, deadline = [], time.monotonic() + SECONDS
    for line in process.stdout:
        found.append(json.loads(line))
        assert time.monotonic() < deadline
        if found[-1]["step"] == step:
            break
    return found


def curve(told):
    return {entry["step"]: entry["loss"] for entry in told}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with launched(tmp_path_factory.mktemp("undisturbed")) as process:
        told = losses_until(process)
        assert process.wait(SECONDS) == 0
    assert [entry["step"] for entry in told] == list(range(1, MANY + 1))
    return curve(told)


def test_a_killed_rank_is_started_again(tmp_path, monkeypatch, hooks):
    """The short form of the next test, for every change: one run, compared with itself.

    The launcher of torchrun starts functions here, whose processes are forked.
    """
    for name, word in {**NEW_STORE, "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM"}.items():
        monkeypatch.setenv(name, word)
    config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="one")
    config.start_method, config.max_restarts = server().get_start_method(), 1
    config.signals_to_handle = "SIGTERM"
    told = tmp_path / "losses"
    elastic_launch(config, train)(tmp_path, told, 20, 5, 12)
    entries = [json.loads(line) for line in told.read_text().splitlines()]
    # The step since the newest checkpoint is repeated, and comes to the same.
    assert [entry["step"] for entry in entries] == [*range(1, 12), *range(11, 21)]
    assert entries[10] == entries[11]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank(undisturbed, tmp_path, rank):
    with launched(tmp_path) as process:
        early = losses_until(process, 12)
        os.kill(process_of(rank, process), signal.SIGKILL)
        late = losses_until(process)
        assert process.wait(SECONDS) == 0
    # The steps since the newest checkpoint are repeated, and come to the same.
    assert len(early + late) > MANY
    assert all(undisturbed[entry["step"]] == entry["loss"] for entry in early + late)
    assert set(curve(early + late)) == set(undisturbed)


@pytest.mark.slow
def test_sigterm_to_torchrun(undisturbed, tmp_path):
    with launched(tmp_path) as process:
        early = losses_until(process, 12)
        process.send_signal(signal.SIGTERM)
        early += losses_until(process)
    last = early[-1]["step"]
    assert 12 <= last < MANY
    assert checkpoints(tmp_path)[-1] == f"step-{last:09d}.pt"
    with launched(tmp_path) as process:
        late = losses_until(process)
        assert process.wait(SECONDS) == 0
    assert late[0]["step"] == last + 1
    assert curve(early + late) == undisturbed
