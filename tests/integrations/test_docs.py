"""The Python of docs/huggingface.md runs as it stands, block after block, on tiny models."""

import functools
import re
from pathlib import Path

import pytest

from lln.integrations import recover as recovery

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"


def blocks():
    """By the heading they stand under."""
    sections = re.split(r"^## (.+)$", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    return {
        heading: re.findall(r"```python\n(.+?)```", text, re.DOTALL)
        for heading, text in zip(sections[1::2], sections[2::2], strict=True)
    }


@pytest.mark.skipif(not PAGE.is_file(), reason="the pages are not part of a source distribution")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_the_page_runs(tiny, tmp_path, save_with_tokenizer, monkeypatch):
    few_steps = functools.partial(recovery.recover, layer_steps=2, end_steps=2, batch_size=4)
    monkeypatch.setattr(recovery, "recover", few_steps)
    monkeypatch.chdir(tmp_path)
    names = {"texts": [f"w{i} w{i + 3} w{i + 7} w{i + 1}" for i in range(2, 30)]}
    names |= {name: tmp_path / name for name in ("folder", "causal_folder", "new_folder")}
    save_with_tokenizer(tiny("roberta"), names["folder"])
    save_with_tokenizer(tiny("llama"), names["causal_folder"])
    found = blocks()
    # It downloads a model, and has tests of its own.
    (vision,) = found.pop("timm")
    assert "pretrained=True" in vision
    for block in (block for section in found.values() for block in section):
        exec(block, names)
        if "config.lln =" in block:
            names["model"](**names["model"].dummy_inputs)
    assert names["report"].done == ["layers", "output"]
    assert (names["new_folder"] / "config.json").is_file()
    assert names["written"].shape[1] == names["prompt"].shape[1] + 20
    assert names["logits"].shape[:2] == (1, 1)
