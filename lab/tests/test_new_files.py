"""Places of files that a command will write are looked at first."""

import pytest
from tests.test_files import special  # noqa: F401

from lln.errors import InvalidInputError
from lln_lab.new_files import check_file


def test_what_is_no_file_is_refused_and_left(special):  # noqa: F811
    before = special.lstat().st_ino
    with pytest.raises(InvalidInputError, match=f"^--out must name a file, got the {special.stem}"):
        check_file(special, "--out")
    assert special.lstat().st_ino == before


def test_nothing_is_made_to_find_out_whether_it_could_be(tmp_path):
    check_file(tmp_path / "a" / "b.json", "--out")
    assert not list(tmp_path.iterdir())
