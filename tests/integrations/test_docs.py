"""The Python of README and of the pages about Hugging Face models runs as it stands."""

import re

import pytest
import torch
from tests.pages import ROOT, blocks, needs_pages, run

pytestmark = [
    needs_pages,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


@pytest.fixture
def given(tiny, tmp_path, save_with_tokenizer, monkeypatch):
    """What the pages take as given: checkpoints on the disk and texts."""
    monkeypatch.chdir(tmp_path)
    names = {"texts": [f"w{i} w{i + 3} w{i + 7} w{i + 1}" for i in range(2, 30)]}
    names |= {name: tmp_path / name for name in ("folder", "causal_folder", "new_folder")}
    save_with_tokenizer(tiny("roberta"), names["folder"])
    save_with_tokenizer(tiny("llama"), names["causal_folder"])
    return names


def test_readme_runs(given, capsys):
    names = run("README.md", given)
    assert len(blocks("README.md")) == 3
    printed = capsys.readouterr().out
    assert "2 of 2 attention layers run lln_keys" in printed
    assert "spectral_gap" in printed
    state = torch.nn.MultiheadAttention(768, 12, batch_first=True).state_dict()
    names["layer"].load_state_dict(state)


def test_how_to_train_runs(given):
    given["labels"] = [number % 2 for number in range(len(given["texts"]))]
    *whole, lora = blocks("docs/how_to/train.md")
    for block in whole:
        exec(block, given)
    assert given["model"].config._attn_implementation == "lln_keys"
    pytest.importorskip("peft")
    exec(lora, given)
    found, expected = (
        given[name].eval()(**given["sample"]).logits for name in ("again", "adapted")
    )
    torch.testing.assert_close(found, expected)


def test_how_to_pack_and_how_to_read_long_documents_run(given):
    hidden = run("docs/how_to/pack.md", {})["hidden"]
    assert hidden.shape == (1, 455, 64)
    assert run("docs/how_to/long_documents.md", given)["before"] > 0


def test_the_guide_runs(given):
    found = by_heading("docs/huggingface.md")
    # With tests of their own, beside the laboratory.
    for heading in ("Converting to a target", "Recovery training"):
        assert len(found.pop(heading)) == 1
    # It downloads a model, and has tests of its own.
    (vision,) = found.pop("timm")
    assert "pretrained=True" in vision
    for block in (block for section in found.values() for block in section):
        exec(block, given)
        if "config.lln =" in block:
            given["model"](**given["model"].dummy_inputs)
    assert given["written"].shape[1] == given["prompt"].shape[1] + 20
    assert given["logits"].shape[:2] == (1, 1)


def by_heading(name):
    text = (ROOT / name).read_text("utf-8")
    sections = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return {
        heading: re.findall(r"```python\n(.+?)```", text, re.DOTALL)
        for heading, text in zip(sections[1::2], sections[2::2], strict=True)
    }
