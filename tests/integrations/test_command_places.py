"""`lln convert` where files, folders and disks are not as they should be."""

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

# Trainer and torch warn about GPUs that are not there.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

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
    with pytest.raises(InvalidInputError, match=r"notes\.txt' is a link to .*text\.txt'"):
        model_commands.convert(folder, tmp_path / "out")
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
def test_the_source_is_left_as_it_is(folder, tmp_path, monkeypatch, unloaded, place):
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
    with pytest.raises(InvalidInputError, match=r"^NEW_FOLDER .* which is left as it is; name a f"):
        model_commands.convert(folder, target, overwrite=True)
    assert state(folder) == before


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_loaded(
    folder, tmp_path, unloaded
):
    text = tmp_path / "text.txt"
    with pytest.raises(InvalidInputError, match=r"^NEW_FOLDER .*written: Not a directory"):
        model_commands.convert(folder, text / "out")


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
