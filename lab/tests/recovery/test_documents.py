"""What pages and an example say about recovery training runs as it stands."""

import functools

import pytest
from tests.integrations.test_docs import by_heading
from tests.integrations.test_examples import run as run_example
from tests.pages import needs_pages, run

from lln_lab.recovery import recover as recovery

# Trainer and torch warn about GPUs that are not there.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@needs_pages
def test_the_tutorial_on_converting_runs(given):
    names = run("docs/tutorials/convert.md", given)
    assert names["report"].done == ["layers", "output"]


@needs_pages
def test_the_guide_runs(given, monkeypatch):
    few_steps = functools.partial(recovery.recover, layer_steps=2, end_steps=2, batch_size=4)
    monkeypatch.setattr(recovery, "recover", few_steps)
    found = by_heading("docs/huggingface.md")
    before = list(found)[: list(found).index("Recovery training") + 1]
    for block in (block for heading in before for block in found[heading]):
        exec(block, given)
        if "config.lln =" in block:
            given["model"](**given["model"].dummy_inputs)
    assert given["report"].done == ["layers", "output"]
    assert (given["new_folder"] / "config.json").is_file()


def test_recover():
    assert set(run_example("recover", "--pretraining", "2", "--steps", "2")) == {
        "softmax",
        "converted",
        "recovered",
    }


@pytest.mark.slow
def test_recover_brings_accuracy_back():
    right = run_example("recover")
    assert right["softmax"] > 0.99
    assert right["converted"] < 0.95
    assert right["recovered"] > 0.99
