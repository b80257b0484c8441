"""Damaged checkpoints of a recovery end in one sentence; one that is killed goes on."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from tests.damage import JSON_FILES, OTHER_FILES, cases, check_refusal

from lln.errors import InvalidInputError
from lln.integrations.convert import convert
from lln.integrations.loading import load_model
from lln_lab.recovery.recover import _read, check_checkpoint, recover

# Trainer and torch warn about GPUs that are not there.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def originals(tiny, text, kept):
    """A converted checkpoint, and a folder that recovery trains in: made once."""
    if not (kept / "lln_keys").exists():
        converted = tiny("bert")
        convert(converted, "lln_keys", calibrate=text(), verbose=False)
        converted.save_pretrained(kept / "lln_keys")
        data = [{name: tensor[0] for name, tensor in text().items()}] * 4
        steps = {"layer_steps": 2, "end_steps": 0, "batch_size": 2, "save_steps": 1}
        training = {"output_dir": kept / "work", "use_cpu": True, "disable_tqdm": True}
        recover(converted, data, **steps, **training)
    return kept


@pytest.fixture
def made(originals, tmp_path):
    """Copies of them, which a test may change."""
    return shutil.copytree(originals, tmp_path / "made")


CHECKPOINT = "work/layers/checkpoint-1"
FILES = {
    "work/recovery.json": JSON_FILES,
    f"{CHECKPOINT}/model.safetensors": OTHER_FILES,
    f"{CHECKPOINT}/trainer_state.json": JSON_FILES,
}


@pytest.mark.parametrize(("file", "damage"), cases(FILES))
def test_a_damaged_file_is_one_sentence(file, damage, originals):
    path = originals / file

    def read():
        if file == "work/recovery.json":
            _read(path.parent)
        else:
            check_checkpoint(load_model(originals / "lln_keys"), path.parent)

    # `check_checkpoint` compares names and sizes; numbers are read when training goes on.
    check_refusal(path, damage, read)


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_training_does_not_go_on_from_a_damaged_checkpoint(made, text, file):
    model = load_model(made / "lln_keys")
    shutil.rmtree(made / "work" / "layers" / "final")
    (made / "work" / "recovery.json").unlink()
    (made / "work" / "layers" / "checkpoint-2" / file).write_bytes(b"damaged")
    data = [{name: tensor[0] for name, tensor in text().items()}] * 4
    training = {"output_dir": made / "work", "use_cpu": True, "disable_tqdm": True}
    with pytest.raises(InvalidInputError, match=r"checkpoint-2' cannot be read .*remove that fold"):
        recover(model, data, layer_steps=3, end_steps=0, batch_size=2, save_steps=1, **training)


@pytest.mark.slow
def test_a_recovery_that_is_killed_again_and_again_ends_as_one_that_is_not(
    tiny, tmp_path, save_with_tokenizer
):
    """Killed where it happens to be, also inside a checkpoint; every start goes on."""
    save_with_tokenizer(tiny("bert"), tmp_path / "in")
    lines = "\n".join(" ".join(f"w{(i * j) % 57 + 2}" for j in range(9)) for i in range(1, 99))
    (tmp_path / "text.txt").write_text(lines)
    options = ["--text", str(tmp_path / "text.txt"), "--tokens", "16", "--save-steps", "1"]
    options += ["--layer-steps", "40", "--end-steps", "20", "--batch-size", "2"]

    def start(name):
        words = ["recover", str(tmp_path / "in"), str(tmp_path / name), *options]
        return subprocess.Popen(
            [sys.executable, "-m", "lln_lab", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            # Both train on one thread, so that their sums are the same.
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )

    def steps():
        phases = {
            phase: [int(path.name.split("-")[1]) for path in found]
            for phase in ("layers", "output")
            if (found := list((tmp_path / "out.work" / phase).glob("checkpoint-*")))
        }
        return max(phases["layers"], default=0) + max(phases.get("output", [0])) if phases else 0

    for step in (1, 15, 30, 50):
        process = start("out")
        end = time.monotonic() + 200
        while steps() < step and process.poll() is None:
            assert time.monotonic() < end
        process.kill()
        assert process.communicate()[1] is not None
        assert process.returncode == -signal.SIGKILL
        assert not (tmp_path / "out").exists()
    for name in ("out", "whole"):
        process = start(name)
        said = process.communicate(timeout=400)[1].decode()
        assert process.returncode == 0, said
    killed, whole = (load_model(tmp_path / name).state_dict() for name in ("out", "whole"))
    for name, one in whole.items():
        assert torch.equal(one, killed[name]), name
