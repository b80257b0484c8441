"""What a converted model's folder says where lln was never imported, and where it was."""

import json
import subprocess
import sys

import pytest
import torch
import transformers

from lln.integrations.convert import convert
from lln.integrations.settings import SAVED_AS, attention_of

STRANGER = """
import sys
import transformers

try:
    transformers.AutoModel.from_pretrained(sys.argv[1])
except ValueError as error:
    print(error)
assert not any(name.split(".")[0] == "lln" for name in sys.modules)
soft = transformers.AutoModel.from_pretrained(sys.argv[1], attn_implementation="eager")
print(soft.config._attn_implementation)
"""
READER = """
import sys
import transformers
{advice}
print(transformers.AutoModel.from_pretrained(sys.argv[1]).config._attn_implementation)
"""


def run(script, folder):
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["lln", "lln_diag"])
def test_a_stranger_is_told_what_to_run_and_it_helps(tiny, text, tmp_path, attention):
    model = tiny("bert")
    convert(model, attention, batch=text(), verbose=False)
    model.save_pretrained(tmp_path)
    told, chosen = run(STRANGER, tmp_path)
    assert "the package lln" in told
    advice = "from lln.integrations.transformers import register; register()"
    assert advice in told
    assert chosen == "eager"
    assert run(READER.format(advice=advice), tmp_path)[-1] == attention


@pytest.mark.parametrize("attention", ["lln", "lln_diag"])
def test_folders_of_before_still_load(tiny, text, tmp_path, attention):
    model = tiny("roberta", attention)
    model.save_pretrained(tmp_path)
    place = tmp_path / "config.json"
    saved = json.loads(place.read_text())
    assert saved["attn_implementation"] == SAVED_AS[attention]
    place.write_text(json.dumps(saved | {"attn_implementation": attention}))
    again = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert again.config._attn_implementation == attention
    assert torch.equal(again(**text())[0], model(**text())[0])
    again.save_pretrained(tmp_path)
    assert json.loads(place.read_text())["attn_implementation"] == SAVED_AS[attention]


def test_parts_of_a_model_come_back_too(tmp_path, tiny):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config=sizes | {"vocab_size": 99, "eos_token_id": 2},
        vision_config=sizes | {"image_size": 32, "patch_size": 8},
        attn_implementation="lln",
    )
    model = transformers.CLIPModel(config).eval()
    model.save_pretrained(tmp_path)
    again = transformers.CLIPModel.from_pretrained(tmp_path).eval()
    for part in (again.config, again.config.text_config, again.config.vision_config):
        assert part._attn_implementation == "lln"
    images = torch.randn(1, 3, 32, 32)
    found, wanted = (one.vision_model(images)[0] for one in (again, model))
    assert torch.equal(found, wanted)


def test_a_model_that_went_back_to_softmax_forgets(tiny, tmp_path):
    tiny("bert", "lln").save_pretrained(tmp_path)
    soft = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="sdpa")
    soft.save_pretrained(tmp_path)
    assert "attn_implementation" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("other", [None, "sdpa", "lln_something", "llnx (of the package)"])
def test_other_names_are_left_alone(other):
    assert attention_of(other) == other
