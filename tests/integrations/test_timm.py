"""timm models, and a module written as timm writes its attention where timm cannot be imported."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lln
from lln.errors import InvalidInputError, UnexpectedArgumentError, UnsupportedModelError
from lln.integrations.timm import attach_described, convert, describe

HEADS, WIDTH = 2, 16


class Attention(nn.Module):
    """Self attention as timm's: one projection, a fused call, no mask."""

    fused_attn = True

    def __init__(self, bias=None):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = bias

    def forward(self, x):
        query, key, value = self.heads(x)
        dropout_p = 0.1 if self.training else 0.0
        x = F.scaled_dot_product_attention(
            query, key, value, attn_mask=self.bias, dropout_p=dropout_p
        )
        return self.proj(x.transpose(1, 2).flatten(2))

    def heads(self, x):
        parts = self.qkv(x).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        return parts.permute(2, 0, 3, 1, 4).unbind(0)


class Vision(nn.Module):
    """Patches, two attention layers, a mean."""

    def __init__(self, bias=None):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = nn.ModuleList([Attention(bias), Attention(bias)])
        self.pretrained_cfg = {"input_size": (3, 16, 16)}

    def forward(self, images):
        x = self.patches(images).flatten(2).mT
        for block in self.blocks:
            x = x + block(x)
        return x.mean(1)


def change(found, expected):
    return (found - expected).abs().max().item()


@pytest.fixture
def images():
    return torch.randn(2, 3, 16, 16)


@pytest.mark.parametrize("attention", ["lln", "lln_diag"])
def test_converted_attention_is_ours(images, attention):
    model = Vision().eval()
    convert(model, attention, block_size=4, verbose=False)
    block = model.blocks[0]
    x = torch.randn(2, 16, WIDTH)
    query, key, value = block.heads(x)
    if attention == "lln":
        expected = lln.lln_attention(query, key, value)
    else:
        expected = lln.lln_diag_attention(query, key, value, block_size=4)
    assert change(block(x), block.proj(expected.transpose(1, 2).flatten(2))) < 1e-6


def test_only_the_layers_asked_for_change_and_others_are_left_alone(images):
    model = Vision().eval()
    softmax = copy.deepcopy(model)
    report = convert(model, "lln_diag", layers=["blocks.1"], calibrate=images, verbose=False)
    assert [layer.attention for layer in report.layers] == ["softmax", "lln_diag"]
    x = torch.randn(2, 16, WIDTH)
    assert change(model.blocks[0](x), softmax.blocks[0](x)) == 0
    assert change(model.blocks[1](x), softmax.blocks[1](x)) > 1e-5
    # Nothing stays behind outside the module.
    query = torch.randn(1, 2, 5, 8)
    assert change(F.scaled_dot_product_attention(query, query, query), softmax_of(query)) < 1e-6


def softmax_of(query):
    return (query @ query.mT / query.shape[-1] ** 0.5).softmax(-1) @ query


def test_a_failing_forward_leaves_nothing_behind(images):
    model = Vision().eval()
    convert(model, "lln_diag", calibrate=images, verbose=False)
    with pytest.raises(RuntimeError):
        model.blocks[0](torch.randn(2, 16, WIDTH + 1))
    query = torch.randn(1, 2, 5, 8)
    assert change(F.scaled_dot_product_attention(query, query, query), softmax_of(query)) < 1e-6
    assert model(images).isfinite().all()


@pytest.mark.parametrize("statistics", ["fixed", "running", "learned"])
def test_save_and_load(images, tmp_path, statistics):
    model = Vision().eval()
    convert(model, "lln_diag", calibrate=images, statistics=statistics, mix="ratio", verbose=False)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    (tmp_path / "lln.json").write_text(json.dumps(describe(model)))
    again = Vision().eval()
    attach_described(again, json.loads((tmp_path / "lln.json").read_text()))
    again.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert change(again(images), model(images)) == 0


def test_a_copy_answers_for_itself(images):
    model = Vision().eval()
    convert(model, "lln_diag", calibrate=images, verbose=False)
    before = model(images)
    other = copy.deepcopy(model)
    other.blocks[0].lln.statistics.alpha *= 5
    assert change(model(images), before) == 0
    assert change(other(images), before) > 1e-6


def test_training_updates_running_statistics_and_drops_keys(images):
    model = Vision().train()
    convert(model, "lln_diag", calibrate=images, statistics="running", verbose=False)
    assert model.blocks[0].lln.training
    first = model(images)
    first.sum().backward()
    assert model.blocks[0].lln.statistics.updates == 2
    assert change(model(images), first) > 1e-6


@pytest.mark.filterwarnings("ignore")
def test_compiles(images):
    model = Vision().eval()
    convert(model, "lln_diag", calibrate=images, verbose=False)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert change(compiled(images), model(images)) < 1e-6


def test_refusals(images):
    with pytest.raises(UnsupportedModelError, match="bias of pairs"):
        convert(Vision(torch.zeros(1, HEADS, 16, 16)), "lln_diag", verbose=False)
    with pytest.raises(UnsupportedModelError, match="never calls"):
        convert(nn.Conv2d(3, 4, 3), "lln_diag", batch=images, verbose=False)
    with pytest.raises(UnsupportedModelError, match=r"blocks\.7"):
        convert(Vision(), "lln_diag", layers=["blocks.7"], verbose=False)
    with pytest.raises(InvalidInputError, match="input_size"):
        convert(nn.Conv2d(3, 4, 3), "lln_diag", verbose=False)
    with pytest.raises(InvalidInputError, match="needs calibrate, "):
        convert(Vision(), "lln_diag", statistics="learned", verbose=False)
    with pytest.raises(UnexpectedArgumentError, match="has no argument 'window'"):
        convert(Vision(), "lln_keys", window=8)
    with pytest.raises(InvalidInputError, match=r"calibrate must be a tensor .* got dict"):
        convert(Vision(), "lln_diag", calibrate={"pixel_values": images})
    model = Vision()
    model.blocks[0].fused_attn = False
    with pytest.raises(UnsupportedModelError, match="set_fused_attn"):
        convert(model, "lln_diag", verbose=False)
    model = Vision()
    convert(model, "lln_diag", verbose=False)
    with pytest.raises(InvalidInputError, match="converted already"):
        convert(model, "lln_diag", verbose=False)


def test_masks_of_keys_are_honoured(images):
    keep = torch.ones(1, 1, 1, 16, dtype=torch.bool)
    keep[..., 10:] = False
    model = Vision(keep).eval()
    convert(model, "lln", calibrate=images, verbose=False)
    block = model.blocks[0]
    x = torch.randn(2, 16, WIDTH)
    other = x.clone()
    other[:, 10:] = 7.0
    assert change(block(x)[:, :10], block(other)[:, :10]) < 1e-6


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_models_of_timm(name):
    timm = pytest.importorskip("timm", exc_type=ImportError)
    model = timm.create_model(name, img_size=56 if "14" in name else 64, depth=2).eval()
    report = convert(model, "lln_diag", verbose=False)
    assert [layer.attention for layer in report.layers] == ["lln_diag", "lln_diag"]
