"""The data folder: what is found, what is refused, and in which words."""

import hashlib

import numpy as np
import pytest
from lab.tests.tasks.data_files import (
    is_one_sentence,
    needs_folder,
    own_copies,
    write,
    write_arrays,
    write_rows,
)

from lln.errors import InvalidInputError
from lln_lab.experiments.tasks import data_folder as module
from lln_lab.experiments.tasks.data_folder import (
    KNOWN,
    OwnCopyWarning,
    Row,
    data_folder,
    read_arrays,
    read_rows,
    read_text,
    text_file,
)

ROWS = [(0, "dull"), (1, "a joy\x85, and\u2028more"), (0, 'say "no"')]


@pytest.fixture
def known(monkeypatch):
    """Make a file a known one."""

    def register(path):
        entry = {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        monkeypatch.setitem(KNOWN, f"{path.parent.name}/{path.name}", entry)

    return register


def damage(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


# The folder


def test_a_folder_that_is_not_given_is_asked_for(monkeypatch):
    monkeypatch.delenv("LLN_DATA", raising=False)
    with pytest.raises(InvalidInputError, match="pass --data FOLDER, or set LLN_DATA") as error:
        data_folder(None)
    assert is_one_sentence(error)


def test_the_variable_stands_in_for_the_option(monkeypatch, tmp_path):
    monkeypatch.setenv("LLN_DATA", str(tmp_path))
    assert data_folder(None) == tmp_path
    (tmp_path / "other").mkdir()
    assert data_folder(tmp_path / "other") == tmp_path / "other"


def test_a_folder_that_does_not_exist_is_refused(monkeypatch, tmp_path):
    with pytest.raises(InvalidInputError, match=r"--data .* is not a folder") as error:
        data_folder(tmp_path / "none")
    assert is_one_sentence(error)
    monkeypatch.setenv("LLN_DATA", str(tmp_path / "none"))
    with pytest.raises(InvalidInputError, match=r"LLN_DATA .* is not a folder"):
        data_folder(None)


def test_a_missing_set_is_named(tmp_path):
    with pytest.raises(InvalidInputError, match=r"imdb' has no file train.tsv.xz or") as error:
        read_rows(tmp_path, "imdb", "train", ("text",), 2)
    assert is_one_sentence(error)


def test_the_folder_of_one_set_is_recognised(tmp_path):
    write(tmp_path / "train.txt", "text")
    with pytest.raises(InvalidInputError, match="give the folder around it") as error:
        read_text(tmp_path, "wikipedia-en", "train")
    assert is_one_sentence(error)


# Checksums


@pytest.mark.parametrize("name", ["train.tsv.xz", "train.tsv"])
def test_a_known_file_is_read_without_a_word(tmp_path, known, name):
    known(write_rows(tmp_path / "imdb" / name, ("text",), ROWS))
    found = read_rows(tmp_path, "imdb", "train", ("text",), 2)
    assert found == [Row(label, (text,)) for label, text in ROWS]


@pytest.mark.parametrize("name", ["train.tsv.xz", "train.tsv"])
def test_one_changed_bit_is_found(tmp_path, known, name):
    path = write_rows(tmp_path / "imdb" / name, ("text",), ROWS)
    known(path)
    damage(path, -20)
    with pytest.raises(InvalidInputError, match=r"is damaged: its SHA-256 .* again") as error:
        read_rows(tmp_path, "imdb", "train", ("text",), 2)
    assert is_one_sentence(error)


@own_copies
@pytest.mark.parametrize("keep", [0, 10, -10])
def test_a_file_that_was_cut_short_is_refused(tmp_path, known, keep):
    path = write_rows(tmp_path / "imdb" / "train.tsv.xz", ("text",), ROWS)
    known(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InvalidInputError, match=r"cannot be read|first line") as error:
        read_rows(tmp_path, "imdb", "train", ("text",), 2)
    assert is_one_sentence(error)


def test_an_own_copy_is_read_with_a_note(tmp_path, known):
    path = write_rows(tmp_path / "imdb" / "train.tsv", ("text",), ROWS)
    known(path)
    write_rows(path, ("text",), ROWS[:2])
    with pytest.warns(OwnCopyWarning, match="read as your own copy"):
        assert len(read_rows(tmp_path, "imdb", "train", ("text",), 2)) == 2


def test_every_known_file_has_a_size_and_a_sum():
    assert len(KNOWN) == 25
    assert all(len(entry["sha256"]) == 64 and entry["bytes"] > 0 for entry in KNOWN.values())


# Formats


@own_copies
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text\tlabel\n0\ta\n", "must name the columns label, text"),
        ("label\ttext\n0\ta\tb\n", "line 2 of .* has 3 columns instead of 2"),
        ("label\ttext\n0\ta\n\n1\tb\n", "line 3 of .* has 1 columns"),
        ("label\ttext\n2\ta\n", "label '2'; labels are whole numbers from 0 to 1"),
        ("label\ttext\n-1\ta\n", "label '-1'"),
        ("label\ttext\n", "has no rows"),
    ],
)
def test_rows_that_do_not_fit_are_refused(tmp_path, text, message):
    write(tmp_path / "imdb" / "train.tsv", text)
    with pytest.raises(InvalidInputError, match=message) as error:
        read_rows(tmp_path, "imdb", "train", ("text",), 2)
    assert is_one_sentence(error)


@own_copies
@pytest.mark.parametrize("name", ["valid.txt", "valid.txt.xz"])
def test_text_is_read_as_it_is(tmp_path, name):
    write(tmp_path / "wikitext-2" / name, " \n = É = \n")
    assert read_text(tmp_path, "wikitext-2", "valid") == " \n = É = \n"


@own_copies
def test_arrays_are_read_by_name(tmp_path):
    path = write_arrays(tmp_path / "cifar10-gray" / "test.npz", y=np.arange(3), other=np.ones(2))
    found = read_arrays(tmp_path, "cifar10-gray", "test", ("y",))
    assert found.keys() == {"y"}
    assert found["y"].tolist() == [0, 1, 2]
    with pytest.raises(InvalidInputError, match=r"has no array Q; it must hold y, Q\.") as error:
        read_arrays(tmp_path, "cifar10-gray", "test", ("y", "Q"))
    assert is_one_sentence(error)
    damage(path, 60)
    with pytest.raises(InvalidInputError, match=r"cannot be read: .* copy the file again"):
        read_arrays(tmp_path, "cifar10-gray", "test", ("y", "other"))
    path.write_bytes(b"no archive")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read_arrays(tmp_path, "cifar10-gray", "test", ("y",))


@needs_folder
def test_the_real_files_are_the_known_ones():
    home = module.data_folder(None)
    suffixes = (*module.TEXT, *module.TABLE, *module.ARRAYS)
    for name in KNOWN:
        data_set, file = name.split("/")
        part = file.split(".")[0]
        # Warnings are errors in these tests, so this also refuses own copies.
        assert module.find_part(home, data_set, part, suffixes) == home / name


@own_copies
def test_plain_text_is_found_in_its_own_folder_or_inside_the_data(tmp_path):
    own = tmp_path / "mine"
    write(own / "train.txt", "a text")
    assert text_file(own, "train") == own / "train.txt"
    write(tmp_path / "wikipedia-en" / "valid.txt", "another")
    assert text_file(tmp_path, "valid") == tmp_path / "wikipedia-en" / "valid.txt"
    with pytest.raises(InvalidInputError, match="wikipedia-en"):
        text_file(own, "valid")
