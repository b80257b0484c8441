"""Names of options that take several are refused with all that are allowed."""

import pytest

from lln import InvalidInputError
from lln_lab.choices import check_choices


def test_all_unknown_names_are_named():
    with pytest.raises(InvalidInputError, match=r"^--x must be among a, b, got y, z\.$"):
        check_choices("--x", ["a", "y", "z"], ("a", "b"))


def test_what_is_known_or_left_out_passes():
    check_choices("--x", ["b"], ("a", "b"))
    check_choices("--x", None, ("a", "b"))
