"""Checkpoint folders that `lln inspect` reads, converted ones and such as hold code."""
# ruff: noqa: F811

import subprocess
import sys

import pytest
from tests.integrations.conftest import save_with_tokenizer, text, tiny  # noqa: F401
from tests.integrations.test_damaged_folders import check_code_is_not_run

from lln.integrations.convert import convert
from lln_lab.inspection.local_model import load_local_model


def test_code_in_a_folder_is_neither_run_nor_asked_for(
    tiny, tmp_path, save_with_tokenizer, monkeypatch
):
    save_with_tokenizer(tiny("bert"), tmp_path / "plain")
    loaders = [lambda folder: load_local_model(str(folder))]
    check_code_is_not_run(tmp_path / "plain", loaders, monkeypatch)


@pytest.mark.slow
def test_a_converted_folder_can_be_inspected(tiny, text, tmp_path, save_with_tokenizer):
    """In a process that has not registered our attention before."""
    model = tiny("bert")
    convert(model, "lln_keys", calibrate=text(40), keys=4, block_size=8)
    save_with_tokenizer(model, tmp_path / "in")
    script = "import sys; from lln_lab.inspection.local_model import load_local_model as load; "
    script += "print(load(sys.argv[1]).model.config._attn_implementation)"
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "in"], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("lln_keys"), done.stderr
