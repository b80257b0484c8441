"""`lln recover` where files, folders and disks are not as they should be."""

import errno
import os
import subprocess
import sys

import pytest
import torch
from tests.integrations.test_command_places import state

from lln.errors import InvalidInputError, WriteError
from lln.integrations.convert import convert
from lln_lab.cli.recover_command import recover as command
from lln_lab.recovery import recovered_folder
from lln_lab.recovery.recover import recover
from lln_lab.recovery.work_folder import last_checkpoint, locked

# Trainer and torch warn about GPUs that are not there.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

STEPS = {"layer_steps": 2, "end_steps": 0, "batch_size": 2, "save_steps": 1}
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
HOLD = """
import sys
from pathlib import Path
from lln_lab.recovery.work_folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def unloaded(monkeypatch):
    """Nothing is loaded: what is refused is refused before."""

    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(recovered_folder, "load_model", load)


def test_what_cannot_be_read_or_written_is_refused_before_anything_is_loaded(
    folder, tmp_path, unloaded
):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    (tmp_path / "old.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InvalidInputError, match=r"^--text .*old\.txt' is not UTF-8 text: byte 3 "):
        command(folder, out, tmp_path / "old.txt", work=tmp_path / "other")
    with pytest.raises(InvalidInputError, match=r"^NEW_FOLDER .*written: Not a directory"):
        command(folder, text / "out", text, work=tmp_path / "work")
    with pytest.raises(InvalidInputError, match=r"^--work .*written: Not a directory"):
        command(folder, out, text, work=text / "work")
    before = state(folder)
    with pytest.raises(InvalidInputError, match=r"^NEW_FOLDER .* which is left as it is; name a f"):
        command(folder, folder / "new", text, overwrite=True)
    assert state(folder) == before
    (folder / "1_Pooling" / "notes.txt").symlink_to(text)
    with pytest.raises(InvalidInputError, match=r"notes\.txt' is a link to .*text\.txt'"):
        command(folder, out, text)
    assert not (tmp_path / "work").exists()
    assert not out.exists()


def test_the_work_folder_is_neither_source_nor_target(folder, tmp_path, unloaded):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    with pytest.raises(InvalidInputError, match=r"^--work .* which is left as it is"):
        command(folder, out, text, work=folder / "work")
    with pytest.raises(InvalidInputError, match=r"^NEW_FOLDER .* around .* holds the checkpoints"):
        command(folder, out, text, work=out / "work")


def training(tiny, text):
    model = tiny("bert")
    convert(model, "lln_diag", calibrate=text(), statistics="running", verbose=False)
    data = [{name: tensor[0] for name, tensor in text().items()}] * 4
    return model, data, {**STEPS, "use_cpu": True, "disable_tqdm": True}


def test_a_disk_that_fills_up_while_training_keeps_the_checkpoint_before(
    tiny, text, tmp_path, monkeypatch
):
    model, data, options = training(tiny, text)
    save, calls = torch.save, []

    def full(content, place, *args, **kwargs):
        if str(place).endswith("optimizer.pt"):
            calls.append(place)
            if len(calls) == 2:
                raise FULL
        return save(content, place, *args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(WriteError, match=r"checkpoint-2' cannot be written: No space left on devi"):
        recover(model, data, output_dir=tmp_path, **options)
    assert [path.name for path in (tmp_path / "layers").glob("check*")] == ["checkpoint-1"]
    model, data, options = training(tiny, text)
    started = []
    report = recover(model, data, output_dir=tmp_path, on_start=started.append, **options)
    assert started == [tmp_path / "layers" / "checkpoint-1"]
    assert report.done == ["layers"]


def test_a_checkpoint_cut_short_is_not_resumed(tmp_path):
    for step in (5, 10, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-100"
    (tmp_path / "checkpoint-100" / "trainer_state.json").write_text('{"epoch":')
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    (tmp_path / "checkpoint-10" / "trainer_state.json").unlink()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-5"
    assert last_checkpoint(tmp_path / "none") is None


@pytest.fixture
def other_run(tmp_path):
    """Another process that trains in the work folder."""
    arguments = [sys.executable, "-c", HOLD, str(tmp_path / "work")]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_run_is_refused_and_the_first_one_undisturbed(
    tiny, text, folder, tmp_path, unloaded, other_run
):
    words, work = tmp_path / "text.txt", tmp_path / "work"
    with pytest.raises(InvalidInputError, match=r"^another run trains in .*in another folder\.$"):
        command(folder, tmp_path / "out", words, work=work)
    model, data, options = training(tiny, text)
    with pytest.raises(InvalidInputError, match=r"^another run trains in .*in another folder\.$"):
        recover(model, data, output_dir=work, **options)
    assert [path.name for path in work.iterdir()] == [".lock"]
    assert other_run.poll() is None
    # Killed, it leaves nothing that has to be cleared away.
    other_run.kill()
    other_run.wait()
    assert recover(model, data, output_dir=work, **options).done == ["layers"]


def test_processes_of_one_run_share_its_lock(tmp_path, monkeypatch):
    with locked(tmp_path):
        monkeypatch.setenv("RANK", "1")
        with locked(tmp_path):
            pass


def test_a_folder_is_free_again_after_a_run_that_failed(tmp_path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("wrong", [{"end_loss": "mse"}, {"statistics": "none"}, {"layers": "9"}])
def test_nothing_is_said_before_a_refusal(folder, tmp_path, capsys, wrong):
    with pytest.raises(InvalidInputError):
        command(folder, tmp_path / "out", tmp_path / "text.txt", tokens=16, **wrong)
    assert capsys.readouterr().out == ""


def test_nothing_is_said_before_a_checkpoint_of_another_model_is_refused(
    tiny, text, folder, tmp_path, capsys
):
    model, data, options = training(tiny, text)
    recover(model, data, output_dir=tmp_path / "work", **options)
    capsys.readouterr()
    arguments = (folder, tmp_path / "out", tmp_path / "text.txt")
    with pytest.raises(InvalidInputError, match="is of another model"):
        command(*arguments, work=tmp_path / "work", tokens=16, mix="gate", **STEPS)
    assert capsys.readouterr().out == ""


def test_recovery_runs_on_one_thread_where_that_is_faster(monkeypatch, tmp_path):
    """Other programs keep the processors busy: all threads take ten times as long as one."""
    from lab.tests.commands import app
    from typer.testing import CliRunner

    from lln_lab import threads

    before, seen = torch.get_num_threads(), []
    monkeypatch.setattr(threads, "_probe", lambda: 1.0 if torch.get_num_threads() == 1 else 10.0)
    monkeypatch.setattr(
        recovered_folder,
        "recover_folder",
        lambda *args, **options: seen.append(torch.get_num_threads()),
    )
    torch.set_num_threads(2)
    try:
        options = ["--text", str(tmp_path / "text.txt")]
        out = CliRunner().invoke(app, ["recover", str(tmp_path), str(tmp_path / "b"), *options])
        assert out.exit_code == 0, out.output
        assert seen == [1]
        assert "one thread is faster" in out.output
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
