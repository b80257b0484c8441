"""`lln convert` and `lln recover` where files, folders and disks are not as they should be."""

import errno
import lzma
import os
import pickle
import shutil
import subprocess
import sys
import tracemalloc

import pytest
import torch
import transformers

from lln.cli import model_commands
from lln.errors import InvalidInputError, WriteError
from lln.integrations import folders as commands
from lln.integrations.convert import convert
from lln.integrations.recover import recover
from lln.integrations.work_folder import last_checkpoint, locked

# Trainer and torch warn about GPUs that are not there.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

STEPS = {"layer_steps": 2, "end_steps": 0, "batch_size": 2, "save_steps": 1}
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def folder(tiny, tmp_path, save_with_tokenizer):
    """A checkpoint with a tokenizer; a text lies beside."""
    save_with_tokenizer(tiny("bert"), tmp_path / "in")
    lines = "\n".join(" ".join(f"w{(i * j) % 57 + 2}" for j in range(9)) for i in range(1, 40))
    (tmp_path / "text.txt").write_text(lines)
    return tmp_path / "in"


@pytest.fixture
def unloaded(monkeypatch):
    """Nothing is loaded: what is refused is refused before."""

    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(commands, "load_model", load)


def state(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def test_text_that_is_not_utf8(folder, tmp_path, unloaded):
    (tmp_path / "old.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InvalidInputError, match=r"^--calibrate .*old\.txt' is not UTF-8 text: byt"):
        model_commands.convert(folder, tmp_path / "out", calibrate=tmp_path / "old.txt")
    with pytest.raises(InvalidInputError, match=r"^--text .*old\.txt' is not UTF-8 text: byte 3 "):
        model_commands.recover(folder, tmp_path / "out", tmp_path / "old.txt")


@pytest.mark.parametrize("end", ["\n", " "])
def test_no_more_of_a_text_is_unpacked_than_is_needed(folder, tmp_path, monkeypatch, end):
    """40 MB in 6 kB, once without a single line's end."""

    def load(*args, **kwargs):
        raise ZeroDivisionError

    with lzma.open(tmp_path / "long.txt.xz", "wb", preset=0) as file:
        for _ in range(40):
            file.write(f"words and words{end}".encode() * 62_500)
    monkeypatch.setattr(commands, "load_model", load)
    tracemalloc.start()
    try:
        with pytest.raises(ZeroDivisionError):
            model_commands.convert(
                folder, tmp_path / "out", calibrate=tmp_path / "long.txt.xz", samples=2, tokens=64
            )
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


# Links


def test_a_link_out_of_the_folder_is_refused_before_anything_is_loaded(folder, tmp_path, unloaded):
    text = tmp_path / "text.txt"
    (folder / "1_Pooling" / "notes.txt").symlink_to(text)
    for command, more in (("convert", ()), ("recover", (text,))):
        with pytest.raises(InvalidInputError, match=r"notes\.txt' is a link to .*text\.txt'"):
            getattr(model_commands, command)(folder, tmp_path / "out", *more)
    (folder / "1_Pooling" / "notes.txt").unlink()
    # Nor by way of a cache that is none.
    fake = tmp_path / "snapshots" / "one"
    fake.parent.mkdir()
    folder.rename(fake)
    (tmp_path / "blobs").symlink_to(tmp_path)
    (fake / "notes.txt").symlink_to(tmp_path / "blobs" / "text.txt")
    with pytest.raises(InvalidInputError, match="is a link to"):
        model_commands.convert(fake, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_inside_the_folder_and_into_hugging_faces_cache_are_copied(folder, tmp_path):
    (folder / "again.json").symlink_to("tokenizer.json")
    # As the cache keeps a model: every file is a link to one in ``blobs``.
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / "0123abcd"
    (cache / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(folder.rglob("*"))):
        place = snapshot / path.relative_to(folder)
        if path.is_dir():
            place.mkdir(parents=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            blob = shutil.copy(path, cache / "blobs" / f"{number:08x}")
            place.symlink_to(os.path.relpath(blob, place.parent))
    for source in (folder, snapshot):
        model_commands.convert(source, tmp_path / "out", overwrite=True)
        for name in ("again.json", "tokenizer.json"):
            copied = tmp_path / "out" / name
            assert copied.read_bytes() == (folder / "tokenizer.json").read_bytes()
            assert not copied.is_symlink()


class Program:
    """What a pickle may do when it is opened."""

    def __reduce__(self):
        return os.system, ("exit",)


@pytest.mark.parametrize("content", ["program", "nothing", "cut"])
def test_pickled_weights_that_are_not_opened(folder, tmp_path, content):
    (folder / "model.safetensors").unlink()
    weights = folder / "pytorch_model.bin"
    weights.write_bytes(b"" if content == "nothing" else pickle.dumps(Program(), protocol=2))
    if content == "cut":
        torch.save({"a": torch.ones(1000)}, weights)
        weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(InvalidInputError, match=r"^.*in' cannot be loaded: ") as refused:
        model_commands.convert(folder, tmp_path / "out")
    assert "\n" not in str(refused.value)
    if content != "cut":
        assert "pytorch_model.bin is a pickle" in str(refused.value)
        assert "model.save_pretrained(folder), which writes model.safetensors" in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["same", "dot", "link", "inside", "around"])
@pytest.mark.parametrize("command", ["convert", "recover"])
def test_the_source_is_left_as_it_is(folder, tmp_path, monkeypatch, unloaded, place, command):
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    target = {
        "same": folder,
        "dot": type(folder)("."),
        "link": tmp_path / "link",
        "inside": folder / "new",
        "around": tmp_path,
    }[place]
    before = state(folder)
    arguments = (folder, target, *((tmp_path / "text.txt",) if command == "recover" else ()))
    with pytest.raises(InvalidInputError, match=r"^NEW_FOLDER .* which is left as it is; name a f"):
        getattr(model_commands, command)(*arguments, overwrite=True)
    assert state(folder) == before


def test_the_work_folder_is_neither_source_nor_target(folder, tmp_path, unloaded):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    with pytest.raises(InvalidInputError, match=r"^--work .* which is left as it is"):
        model_commands.recover(folder, out, text, work=folder / "work")
    with pytest.raises(InvalidInputError, match=r"^NEW_FOLDER .* around .* holds the checkpoints"):
        model_commands.recover(folder, out, text, work=out / "work")


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_loaded(
    folder, tmp_path, unloaded
):
    text = tmp_path / "text.txt"
    with pytest.raises(InvalidInputError, match=r"^NEW_FOLDER .*written: Not a directory"):
        model_commands.convert(folder, text / "out")
    with pytest.raises(InvalidInputError, match=r"^NEW_FOLDER .*written: Not a directory"):
        model_commands.recover(folder, text / "out", text, work=tmp_path / "work")
    with pytest.raises(InvalidInputError, match=r"^--work .*written: Not a directory"):
        model_commands.recover(folder, tmp_path / "out", text, work=text / "work")
    assert not (tmp_path / "work").exists()


# A full disk


def test_a_disk_that_is_full_at_the_end_of_a_conversion(folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    model_commands.convert(folder, out)
    before = state(out)
    whole = transformers.PreTrainedModel.save_pretrained

    def half(self, place, **options):
        whole(self, place, **options)
        raise FULL

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", half)
    with pytest.raises(WriteError, match=r"out' cannot be written: No space left on device; nothi"):
        model_commands.convert(folder, out, overwrite=True)
    with pytest.raises(WriteError):
        model_commands.convert(folder, tmp_path / "other")
    assert state(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "text.txt"]


@pytest.mark.slow
def test_a_limit_on_the_size_of_files(folder, tmp_path):
    """safetensors says in its own words what the system said."""
    script = (
        # Python itself would leave compiled files that are cut short.
        "import resource, sys; sys.dont_write_bytecode = True; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)); "
        "from lln.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "convert", str(folder), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 2
    assert "out' cannot be written: File too large; nothing was left there" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "text.txt"]


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


# Two runs in one folder

HOLD = """
import sys
from pathlib import Path
from lln.integrations.work_folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


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
        model_commands.recover(folder, tmp_path / "out", words, work=work)
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


# Refuse first


@pytest.mark.parametrize("wrong", [{"end_loss": "mse"}, {"statistics": "none"}, {"layers": "9"}])
def test_nothing_is_said_before_a_refusal(folder, tmp_path, capsys, wrong):
    with pytest.raises(InvalidInputError):
        model_commands.recover(folder, tmp_path / "out", tmp_path / "text.txt", tokens=16, **wrong)
    assert capsys.readouterr().out == ""


def test_nothing_is_said_before_a_checkpoint_of_another_model_is_refused(
    tiny, text, folder, tmp_path, capsys
):
    model, data, options = training(tiny, text)
    recover(model, data, output_dir=tmp_path / "work", **options)
    capsys.readouterr()
    arguments = (folder, tmp_path / "out", tmp_path / "text.txt")
    with pytest.raises(InvalidInputError, match="is of another model"):
        model_commands.recover(*arguments, work=tmp_path / "work", tokens=16, mix="gate", **STEPS)
    assert capsys.readouterr().out == ""


def test_recovery_runs_on_one_thread_where_that_is_faster(monkeypatch, tmp_path):
    """Other programs keep the processors busy: all threads take ten times as long as one."""
    from typer.testing import CliRunner

    from lln import cli
    from lln.cli import threads
    from lln.integrations import folders

    before, seen = torch.get_num_threads(), []
    monkeypatch.setattr(threads, "_probe", lambda: 1.0 if torch.get_num_threads() == 1 else 10.0)
    monkeypatch.setattr(
        folders, "recover_folder", lambda *args, **options: seen.append(torch.get_num_threads())
    )
    torch.set_num_threads(2)
    try:
        options = ["--text", str(tmp_path / "text.txt")]
        out = CliRunner().invoke(cli.app, ["recover", str(tmp_path), str(tmp_path / "b"), *options])
        assert out.exit_code == 0, out.output
        assert seen == [1]
        assert "one thread is faster" in out.output
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
