"""Options that cannot be used are refused in a sentence, before anything is done."""

import pytest
from lab.tests.commands import app
from typer.testing import CliRunner

from lln.errors import InvalidInputError

ALL = [
    ("--device abacus", "--device must be cpu or cuda"),
    ("--lengths 0", "--lengths must be at least 1, got 0"),
    ("--seconds 0", "--seconds must be a positive number"),
    ("--seconds nan", "--seconds must be a positive number"),
]
OWN = [
    ("--operations magic", "--operations must be among sdpa"),
    ("--passes sideways", "--passes must be among forward, both, got sideways"),
    ("--dtype int8", "--dtype must be among"),
    ("--width 0", "--width must be at least 1"),
    ("--threads 0", "--threads must be at least 1"),
    ("--device cpu --operations sdpa_flash", "give --lengths"),
    ("--device cpu roberta", "follow its name, got --device"),
    ("roberta --systems magic", "--systems must be among softmax_sdpa"),
    ("roberta --layers 0", "--layers must be at least 1"),
    ("roberta --tokens -1", "--tokens must be at least 0"),
    ("peers --systems magic", "--systems must be among softmax"),
    ("peers --tokens -1", "--tokens must be at least 0"),
    ("peers --limit -1", "--limit must be a positive number"),
]
COMMANDS = ("", "roberta ", "peers ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [*((bench + words, said) for bench in COMMANDS for words, said in ALL), *OWN],
)
def test_bad_options_are_refused_in_a_sentence(tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError, match=sentence):
        CliRunner().invoke(app, ["bench", *words.split()], catch_exceptions=False)
    assert not list(tmp_path.iterdir())
