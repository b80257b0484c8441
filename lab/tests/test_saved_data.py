"""Files that others may have written are data, whatever they hold."""

import os

import pytest
import torch

from lln.errors import InvalidInputError
from lln_lab.saved_data import read_saved


class Program:
    """What a pickle may do when it is opened."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_saved_file_runs_no_code(tmp_path):
    seen, file = tmp_path / "seen", tmp_path / "state.pt"
    torch.save({"step": 3, "more": Program(seen)}, file)
    with pytest.raises(InvalidInputError, match=r"state\.pt.* is not a checkpoint .*; remove it\."):
        read_saved(file, {"step": int}, "a checkpoint", "remove it")
    assert not seen.exists()


def test_a_saved_file_of_data_is_read(tmp_path):
    file = tmp_path / "state.pt"
    torch.save({"step": 3, "weight": torch.ones(2)}, file)
    assert read_saved(file, {"step": int}, "a checkpoint", "remove it")["weight"].tolist() == [1, 1]
