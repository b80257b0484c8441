"""The Python of README's neighbours runs as it stands, block after block."""

import re

import pytest
import torch
from tests.pages import ROOT, blocks, needs_pages, run

pytestmark = needs_pages


@pytest.fixture(autouse=True)
def one_thread(tmp_path, monkeypatch):
    """Models this small lose to threads that wait for each other; files go to a folder of ours."""
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_the_guide_to_building_runs():
    run("docs/models.md", {})
    assert len(blocks("docs/models.md")) == 10


def test_the_tutorial_on_building_tells_the_truth_about_its_losses():
    losses = run("docs/tutorials/build.md", {})["losses"]
    assert losses["softmax"] < 0.2
    assert losses["LLN + Diag"] < 0.2
    assert losses["Diag alone"] > 1.0


def test_files_that_pages_name_exist():
    folders = ("src", "tests", "examples", "lab", "docs")
    known = {f"/{path.name}" for path in ROOT.glob("*.py")} | {
        f"/{path.relative_to(ROOT)}" for name in folders for path in (ROOT / name).rglob("*.py")
    }
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        if page.name == "CHANGELOG.md":
            continue
        for name in re.findall(r"`(?:[\w.]+/)*\w+\.py`", page.read_text("utf-8")):
            ends = f"/{name.strip('`')}"
            assert any(path.endswith(ends) for path in known), f"{page.name} names {name}"


def test_readme_is_short_enough_to_be_read():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120
