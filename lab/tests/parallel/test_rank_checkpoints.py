"""Checkpoints: the one just written stays, what cannot be read again is refused."""

import os
import re
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lln.errors import InvalidInputError, PeerError, WriteError
from lln_lab.rank_checkpoints import load_newest, save_checkpoint


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def name_of(step):
    return f"step-{step:09d}.pt"


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_newest_of_a_run_are_kept(tmp_path, alone):
    for step in range(4):
        save_checkpoint(tmp_path, step, {"number": step})
    assert names(tmp_path) == [name_of(2), name_of(3)]
    assert load_newest(tmp_path) == (3, {"number": 3})


def test_broken_files_of_later_steps_do_not_cost_a_good_one(tmp_path, alone):
    for step in (7, 8, 9):
        (tmp_path / name_of(step)).write_bytes(b"damaged")
    save_checkpoint(tmp_path, 1, {"number": 1})
    save_checkpoint(tmp_path, 2, {"number": 2})
    with pytest.warns(UserWarning, match="is skipped, it cannot be read"):
        assert load_newest(tmp_path) == (2, {"number": 2})
    assert names(tmp_path)[:2] == [name_of(1), name_of(2)]


def test_broken_files_of_earlier_steps_are_not_counted(tmp_path):
    save_checkpoint(tmp_path, 1, {"number": 1})
    for step in (2, 3):
        (tmp_path / name_of(step)).write_bytes(b"damaged")
    save_checkpoint(tmp_path, 4, {"number": 4})
    assert names(tmp_path) == [name_of(1), name_of(4)]


def test_other_files_are_neither_counted_nor_removed_nor_read(tmp_path, alone):
    others = ["step-best.pt", "step-1.pt", "weights.pt"]
    for other in others:
        (tmp_path / other).write_bytes(b"somebody else's")
    for step in (10**9, 10**9 + 1):
        save_checkpoint(tmp_path, step, {"number": step}, keep=1)
    assert names(tmp_path) == sorted([*others, name_of(10**9 + 1)])
    assert load_newest(tmp_path) == (10**9 + 1, {"number": 10**9 + 1})


@pytest.mark.parametrize("step", [1, 2], ids=["same step", "next step"])
@pytest.mark.parametrize("content", [Path("a"), lambda: None], ids=["refused", "cannot be written"])
def test_what_could_not_be_read_again_is_refused(tmp_path, alone, step, content):
    save_checkpoint(tmp_path, 1, {"number": 1})
    with pytest.raises(InvalidInputError, match="save state_dict") as found:
        save_checkpoint(tmp_path, step, {"content": content})
    assert not re.search(r"[.!?]\s+[A-Z]", str(found.value))
    assert names(tmp_path) == [name_of(1)]
    assert load_newest(tmp_path) == (1, {"number": 1})


def test_sparse_tensors_can_be_read_again(tmp_path, alone):
    save_checkpoint(tmp_path, 1, {"mask": torch.eye(3).to_sparse()})
    _, content = load_newest(tmp_path)
    assert torch.equal(content["mask"].to_dense(), torch.eye(3))


def test_a_full_disk_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, {"number": 1})
    (tmp_path / f".{name_of(2)}.half").write_bytes(b"left by a process that was killed")

    def half(content, file):
        assert names(tmp_path)[-1] == name_of(1)
        assert f".{name_of(2)}.half" not in names(tmp_path)
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(
        WriteError, match=r"step-000000002.pt' cannot be written: No space"
    ) as found:
        save_checkpoint(tmp_path, 2, {"number": 2})
    assert "make room there" in str(found.value)
    assert names(tmp_path) == [name_of(1)]


def test_the_content_is_on_the_disk_before_its_name(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *given, name=name, real=real: (done.append(name), real(*given))
        )
    save_checkpoint(tmp_path, 1, {"number": 1})
    assert done == ["fsync", "replace", "fsync"]


@pytest.mark.parametrize(
    ("shared", "restarts", "warns"),
    [("True", "3", True), ("False", "3", False), ("True", "0", False)],
)
def test_restarts_that_may_hang(tmp_path, alone, monkeypatch, shared, restarts, warns):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert load_newest(tmp_path) is None
    assert ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(one.message) for one in said] == (
        [True] if warns else []
    )


@pytest.mark.parametrize("numbers", [{"step": -1}, {"keep": 0}])
def test_numbers_that_cannot_be(tmp_path, numbers):
    with pytest.raises(InvalidInputError, match="must be an integer of at least"):
        save_checkpoint(tmp_path, **{"step": 1, "content": {}, **numbers})


def left_alone(group, rank, folder):
    """Rank 1 does not come."""
    own = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank > 0:
        return None
    try:
        load_newest(folder, own)
    except PeerError as error:
        return str(error)
    return None


def test_a_checkpoint_that_one_rank_does_not_ask_for(pool, tmp_path):
    message = pool.run(left_alone, 4, tmp_path)[0]
    assert message.startswith("lln_lab.rank_checkpoints.load_newest: agreeing on a checkpoint")
