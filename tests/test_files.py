"""Files that are never half written, places that are looked at first, text that is UTF-8."""

import errno
import gzip
import lzma
import os
import subprocess
import sys

import pytest
import torch

from lln.checks import reading
from lln.checks.reading import each_line, text_parts
from lln.errors import InvalidInputError, LLNError, WriteError
from lln.files import (
    check_apart,
    check_folder,
    check_free,
    new_folder,
    replacing,
    write_atomically,
)

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(params=["pipe", "device", "folder"])
def special(request, tmp_path):
    """Something at a place that is no regular file."""
    path = tmp_path / f"{request.param}.html"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "folder":
        path.mkdir()
    else:
        # A link: a test that fails must not replace the machine's own.
        path.symlink_to(os.devnull)
    return path


def test_what_is_no_file_is_refused_and_left(special):
    before = special.lstat().st_ino
    with pytest.raises(InvalidInputError, match=special.stem):
        write_atomically(special, "text")
    assert special.lstat().st_ino == before


def test_a_link_stays_one(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


def test_nothing_is_made_to_find_out_whether_it_could_be(tmp_path):
    check_folder(tmp_path / "a" / "b", "--out")
    check_free(tmp_path / "a" / "b", overwrite=False, name="--out")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match=r"^--out must name a folder, got the file"):
        check_folder(tmp_path / "file", "--out")


# A full disk


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError('IoError(Os { code: 28, kind: StorageFull, message: "No space left" })'),
    ],
    ids=["os", "safetensors", "older safetensors"],
)
def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path, error):
    path, folder = tmp_path / "file", tmp_path / "folder"
    path.write_text("old")
    folder.mkdir()
    (folder / "config.json").write_text("old")

    def write():
        with replacing(path) as file:
            file.write(b"half")
            raise error

    def fill():
        with new_folder(folder, overwrite=True, name="NEW_FOLDER") as new:
            (new / "config.json").write_text("half")
            raise error

    with pytest.raises(WriteError, match=r"file' cannot be written: No space left on device; any"):
        write()
    with pytest.raises(WriteError, match=r"folder' cannot be written: No space left on device; no"):
        fill()
    assert path.read_text() == "old"
    assert (folder / "config.json").read_text() == "old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder"]
    assert issubclass(WriteError, LLNError)


def test_errors_that_are_not_of_the_disk_stay_what_they_are(tmp_path):
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "file"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_a_limit_on_the_size_of_files(tmp_path):
    """The system itself says no, to torch and to plain text."""
    script = f"""
import resource, sys, torch
# Python itself would leave compiled files that are cut short.
sys.dont_write_bytecode = True
from pathlib import Path
from lln.errors import WriteError
from lln.files import replacing, write_atomically
folder = Path({str(tmp_path)!r})
write_atomically(folder / "text", "old")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
def save():
    with replacing(folder / "weights.pt") as file:
        torch.save(torch.zeros(10000), file)
for attempt in (lambda: write_atomically(folder / "text", "x" * 5000), save):
    try:
        attempt()
    except WriteError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cannot be written: File too large; ") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["text"]
    assert (tmp_path / "text").read_text() == "old"


def test_a_folder_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "a" / "model"
    for text in ("one", "two"):
        with new_folder(target, overwrite=True, name="NEW_FOLDER") as folder:
            (folder / "config.json").write_text(text)
            assert text == "two" or not target.exists()
        assert (target / "config.json").read_text() == text
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_overwriting_takes_checkpoints_only(tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "mine.txt").write_text("kept")
    (tmp_path / "file").write_text("kept")
    (tmp_path / "empty").mkdir()
    for name in ("letters", "file"):
        with pytest.raises(InvalidInputError, match=r"^--overwrite replaces checkpoint folders"):
            check_free(tmp_path / name, overwrite=True, name="NEW_FOLDER")
    check_free(tmp_path / "empty", overwrite=True, name="NEW_FOLDER")


def test_folders_apart(tmp_path, monkeypatch):
    source = tmp_path / "models" / "source"
    source.mkdir(parents=True)
    (tmp_path / "link").symlink_to(source)
    monkeypatch.chdir(source)
    for written, where in (
        (source, "the same folder as"),
        (tmp_path / "link", "the same folder as"),
        (type(source)("."), "the same folder as"),
        (source / "new", "inside"),
        (tmp_path / "link" / "new", "inside"),
        (source / ".." / "source", "the same folder as"),
        (source.parent, "around"),
    ):
        with pytest.raises(InvalidInputError, match=f"{where} .*which stays; name a folder beside"):
            check_apart(source, written, "NEW_FOLDER", "stays")
    check_apart(source, tmp_path / "models" / "source-2", "NEW_FOLDER", "stays")


# Text


def text_of(path, most=None):
    return "".join(text_parts(path, f"--text {str(path)!r}", most))


def lines_of(path):
    return list(each_line(path, "--text"))


def test_text_that_is_not_utf8_is_one_sentence(tmp_path):
    path = tmp_path / "old.txt"
    path.write_bytes(b"first\nsecond caf\xe9\n")
    with pytest.raises(
        InvalidInputError, match=r"^--text .*old\.txt' is not UTF-8 text: byte 16 \(line 2\).*iconv"
    ):
        text_of(path)
    path.write_bytes("text".encode("utf-16"))
    with pytest.raises(InvalidInputError, match=r"byte 0 .*iconv -f utf-16"):
        text_of(path)
    path.write_bytes("text".encode("utf-16-le"))
    with pytest.raises(InvalidInputError, match="holds no text; name a plain text file"):
        text_of(path)


def test_only_a_cut_of_ours_may_end_inside_a_character(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("aé".encode())
    assert text_of(path, most=2) == "a"
    path.write_bytes("aé".encode()[:2])
    with pytest.raises(InvalidInputError, match="byte 1"):
        text_of(path)


def test_lines_of_files_packed_or_not(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\n two \rthree")
    with lzma.open(tmp_path / "b.txt.xz", "wb") as file:
        file.write(b"four\n")
    assert lines_of(tmp_path) == ["one", "two", "three", "four"]
    (tmp_path / "b.txt.xz").write_bytes(b"no archive")
    with pytest.raises(InvalidInputError, match=r"^--text .*b\.txt\.xz' cannot be read: "):
        lines_of(tmp_path)
    with pytest.raises(InvalidInputError, match=r"^--text .*none' is neither a text file nor"):
        lines_of(tmp_path / "none")


def test_text_without_end_is_refused_and_long_lines_are_cut(tmp_path, monkeypatch):
    with gzip.open(tmp_path / "text.txt.gz", "wb") as file:
        file.write("ä".encode() * 900_000 + b"\nend")
    assert lines_of(tmp_path / "text.txt.gz") == ["ä" * 900_000, "end"]
    monkeypatch.setattr(reading, "_LONGEST_LINE", 400_000)
    assert "".join(lines_of(tmp_path / "text.txt.gz")) == "ä" * 900_000 + "end"
    assert max(map(len, lines_of(tmp_path / "text.txt.gz"))) < 900_000
    monkeypatch.setattr(reading, "MOST_BYTES", 1_800_004)
    lines_of(tmp_path / "text.txt.gz")
    monkeypatch.setattr(reading, "MOST_BYTES", 1_800_003)
    with pytest.raises(InvalidInputError, match=r"text\.txt\.gz' holds more than 1,800,003 bytes"):
        lines_of(tmp_path / "text.txt.gz")


def test_weights_saved_through_the_writer_come_back(tmp_path):
    with replacing(tmp_path / "weights.pt") as file:
        torch.save({"a": torch.ones(3)}, file)
    assert torch.equal(torch.load(tmp_path / "weights.pt")["a"], torch.ones(3))
