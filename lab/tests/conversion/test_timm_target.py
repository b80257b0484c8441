"""timm models converted to a target: the search is that of Hugging Face models."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from tests.integrations.test_timm import Vision
from torch.nn import functional as F

from lln.errors import CalibrationWarning, InvalidInputError
from lln.integrations.attached import KeptSoftmax
from lln.integrations.sdpa import AnsweredHeads
from lln.integrations.timm import attach_described, convert, describe

SIDE = 32
TOKENS = (SIDE // 4) ** 2


@pytest.fixture
def sharp():
    """A model whose attention is sharp enough to need keys."""
    model = Vision().eval()
    with torch.no_grad():
        for block in model.blocks:
            block.qkv.weight[:32] *= 8
    return model


@pytest.fixture
def images():
    return torch.randn(2, 3, SIDE, SIDE)


@pytest.fixture
def unseen():
    return torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def cosine(found, expected):
    return F.cosine_similarity(found.double(), expected.double(), dim=-1).mean().item()


def test_the_target_is_reached_and_the_report_is_of_the_model(sharp, images, unseen):
    softmax, steps = copy.deepcopy(sharp), []
    report = convert(
        sharp, target=0.99, calibrate=images, holdout=unseen, block_size=8,
        on_step=lambda *step: steps.append(step),
    )  # fmt: skip
    found = report.target
    assert found.quality == pytest.approx(cosine(sharp(images), softmax(images)), abs=1e-6)
    assert found.holdout == pytest.approx(cosine(sharp(unseen), softmax(unseen)), abs=1e-6)
    assert found.quality >= 0.99
    assert found.compared == "logits"
    assert found.tokens == TOKENS
    assert [row.name for row in found.rows] == ["softmax", "K = 0", "K = 16", "K = 32", "choice"]
    assert found.rows[1].quality < 0.99
    assert list(found.choice) == ["blocks.0", "blocks.1"]
    for keys, block, layer in zip(found.choice.values(), sharp.blocks, report.layers, strict=True):
        kind = KeptSoftmax if keys is None else AnsweredHeads
        assert type(block.lln) is kind
        assert layer.keys == keys
        assert layer.attention == ("softmax" if keys is None else "lln_keys")
    assert [step for step in steps if step[0] == "layers"] == [("layers", n, 2) for n in range(3)]
    assert {part for part, *_ in steps} == {"layers", "search", "held out", "timing"}


def test_uniform_rows_are_uniform_conversions(sharp, images):
    other, softmax = copy.deepcopy(sharp), copy.deepcopy(sharp)
    report = convert(sharp, target=0.9, calibrate=images, block_size=8)
    alone = convert(other, "lln_keys", calibrate=images, keys=16, block_size=8)
    row = next(row for row in report.target.rows if row.name == "K = 16")
    assert row.quality == pytest.approx(cosine(other(images), softmax(images)), abs=1e-6)
    for layer, tried in zip(alone.layers, report.target.layers, strict=True):
        assert tried.errors[16] == pytest.approx(layer.moved, rel=1e-4)


def test_the_choice_is_saved_and_loaded(sharp, images, tmp_path):
    softmax = copy.deepcopy(sharp)
    report = convert(sharp, target=0.97, calibrate=images, block_size=8)
    described = json.loads(json.dumps(describe(sharp)))
    kept = {name: keys for name, keys in report.target.choice.items() if keys is not None}
    assert {name: entry["sizes"]["keys"] for name, entry in described.items()} == kept
    attach_described(softmax, described)
    softmax.load_state_dict(sharp.state_dict())
    assert torch.equal(softmax(images), sharp(images))


def test_where_nothing_but_softmax_reaches_the_target_the_model_stays_itself(sharp, images):
    softmax = copy.deepcopy(sharp)
    with pytest.warns(CalibrationWarning, match="all stay softmax"):
        report = convert(sharp, target=1 - 1e-12, calibrate=images, block_size=8)
    assert set(report.target.choice.values()) == {None}
    assert torch.equal(sharp(images), softmax(images))
    convert(sharp, "lln", calibrate=images)
    convert(softmax, "lln", calibrate=images)
    assert torch.equal(sharp(images), softmax(images))


def test_features_are_compared_where_there_is_no_head(sharp, images):
    sharp.num_classes = 0
    assert convert(sharp, target=0.9, calibrate=images, block_size=8).target.compared == "features"


def test_a_search_that_fails_leaves_the_model_as_it_was(sharp, images):
    before, state = sharp(images), list(sharp.state_dict())

    def stop(part, step, steps):
        if part == "search":
            raise KeyboardInterrupt

    sharp.train()
    sharp.blocks[1].eval()
    with pytest.raises(KeyboardInterrupt):
        convert(sharp, target=0.99, calibrate=images, block_size=8, on_step=stop)
    assert list(sharp.state_dict()) == state
    assert sharp.training and not sharp.blocks[1].training  # noqa: PT018
    assert not any(block._forward_pre_hooks or block._forward_hooks for block in sharp.blocks)
    assert torch.equal(sharp.eval()(images), before)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target": 0.9}, "target needs calibrate"),
        ({"target": 1.0, "calibrate": True}, "between 0 and 1"),
        ({"target": 0.9, "attention": "lln", "calibrate": True}, "goes with attention 'lln_keys'"),
        ({"target": 0.9, "keys": 8, "calibrate": True}, "leave keys out"),
        ({"calibrate": True, "holdout": True}, "holdout goes with target"),
    ],
)
def test_what_does_not_fit_gets_a_sentence(sharp, images, options, said):
    given = {name: images if value is True else value for name, value in options.items()}
    with pytest.raises(InvalidInputError, match=said):
        convert(sharp, **given)


def test_models_of_timm_reach_a_target():
    timm = pytest.importorskip("timm", exc_type=ImportError)
    model = timm.create_model("vit_tiny_patch16_224", img_size=96, depth=2).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[: 2 * model.embed_dim] *= 8
    report = convert(model, target=0.99, calibrate=torch.randn(2, 3, 96, 96), block_size=8)
    assert report.target.quality >= 0.99
    assert len(report.target.choice) == 2


def test_transformers_is_not_needed():
    blocked = "import sys; sys.modules['transformers'] = None; import lln.integrations.timm"
    subprocess.run([sys.executable, "-c", blocked], check=True)
