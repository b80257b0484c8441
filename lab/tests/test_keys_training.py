"""The study of exact keys: every variant trains, the form ends in softmax, a tiny run is whole."""

import json
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lln_lab.experiments import keys_training
from lln_lab.experiments.keys_training_choice import (
    SELECTIONS,
    by_features,
    choose,
    mark_largest,
    own_block,
)
from lln_lab.experiments.keys_training_data import masked, training_batches
from lln_lab.experiments.keys_training_model import (
    KINDS,
    Attention,
    MaskedEncoder,
    ModelSizes,
    Variant,
    convolve,
    dense_core,
    for_every_query,
    in_shifted_blocks,
    log_share,
    summarise,
)

pytestmark = pytest.mark.slow

SIZES = ModelSizes(length=64, layers=2, width=32, heads=2, block=16, keys=8, vocabulary=50)
VARIANTS = [
    *KINDS,
    *(f"diag/{kind}" for kind in KINDS if kind != "diag"),
    *(f"diag/{kind}+noslots" for kind in SELECTIONS),
    *(f"diag/{kind}+conv" for kind in KINDS),
    "diag/half+keys16",
]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batch(length=SIZES.length):
    windows = torch.randint(1, SIZES.vocabulary, (3, length))
    return masked(windows, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_takes_a_step(name):
    torch.manual_seed(0)
    model = MaskedEncoder(SIZES, Variant.parse(name))
    cell = keys_training.KeysCell(name, 0, SIZES)
    optimizer = keys_training.optimizer_of(model, cell, "cpu")
    given = batch()
    losses = []
    for _ in range(4):
        loss = model(*given)
        optimizer.zero_grad()
        loss.backward()
        for parameter_name, parameter in model.named_parameters():
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.isfinite().all(), parameter_name
            assert parameter.grad.any(), parameter_name
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] < 1.2 * math.log(SIZES.vocabulary)


@pytest.mark.parametrize("core", ["dense", "sdpa"])
@pytest.mark.parametrize("kind", ["random", "block", "group"])
def test_with_every_key_exact_it_is_softmax(kind, core):
    sizes = ModelSizes(length=64, width=32, heads=2, block=16, keys=48, core=core)
    layer = Attention(sizes, kind, Variant((kind,)))
    q, k, v = torch.randn(3, 2, 64, 2, 16).unbind()
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    keep = layer.keep(torch.stack([q, k, v], 2))
    found = layer.mix(q, k, v, keep)
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", SELECTIONS)
def test_both_cores_agree_with_gradients(kind):
    found = []
    for core in ("dense", "sdpa"):
        torch.manual_seed(1)
        sizes = ModelSizes(length=64, width=32, heads=2, block=16, keys=8, core=core)
        layer = Attention(sizes, kind, Variant((kind,)))
        # For inputs of unit variance; what a layer starts with would leave all mass to the slots.
        with torch.no_grad():
            layer.alpha.fill_(1.0), layer.beta.fill_(1.0), layer.offset.fill_(-2.0)
        q, k, v = torch.randn(3, 2, 64, 2, 16, requires_grad=True).unbind()
        out = layer.mix(q, k, v, layer.keep(torch.stack([q, k, v], 2)))
        inputs = (q, k, v, layer.alpha, layer.beta, layer.offset)
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "fewest", "together"),
    [("random", 40, 32), ("block", 40, 32), ("group", 40, 16), ("query", 32, 1), ("half", 36, 1)],
)
def test_how_many_keys_are_exact_and_who_shares_them(kind, fewest, together):
    q, k = torch.randn(2, 2, 2, 128, 16)
    keep = for_every_query(choose(kind, q, k.mT, 8, 32) != 0, 128)
    assert keep[..., own_block(128, 32, q.device)].all()
    counts = keep.sum(-1)
    assert counts.min() >= fewest
    assert counts.max() == 40
    for size in (32, 16, 2):
        rows = keep.unflatten(2, (-1, size))
        assert (rows == rows[..., :1, :]).all() == (size <= together)


@pytest.mark.parametrize("count", [1, 7, 64])
def test_the_largest_are_marked_and_the_first_of_equal_ones(count):
    scores = torch.randn(3, 5, 64)
    scores[0] = scores[0].round()
    scores[1, :, ::2] = -math.inf
    scores[2, 0] = 0.0
    first = scores.bfloat16().sort(dim=-1, descending=True, stable=True).indices[..., :count]
    expected = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, first, True)
    assert torch.equal(mark_largest(scores, count), expected)


def test_keys_by_mean_and_by_features_are_the_largest():
    def largest(scores, count):
        return set(scores.bfloat16().sort(descending=True, stable=True).indices[:count].tolist())

    q, k = torch.randn(2, 1, 1, 64, 16)
    keep = choose("block", q, k.mT, 8, 16)[0, 0, 1]
    scores = q[0, 0, 16:32].mean(0) @ k[0, 0].T
    scores[16:32] = -math.inf
    assert largest(scores, 8) == set(keep.nonzero().flatten().tolist()) - set(range(16, 32))
    first, second = torch.cat([q, -q], -1)[0, 0, 5].topk(2).indices
    signed = torch.cat([k, -k], -1)[0, 0]
    expected = largest(signed[:, first], 4) | largest(signed[:, second], 4)
    found = by_features(q, k.mT, 8, own_block(64, 16, q.device)[::16])[0, 0, 5]
    assert set(found.nonzero().flatten().tolist()) == expected | set(range(16))


def test_slots_start_with_the_mass_of_the_tokens_they_stand_for():
    torch.manual_seed(0)
    sizes = ModelSizes(length=512, width=256, heads=4, block=64, keys=64)
    layer = Attention(sizes, "block", Variant(("block",)))
    deviation = 0.02 * 256**0.5
    q, k, v = deviation * torch.randn(3, 2, 4, 512, 64)
    keep = choose("random", q, k.mT, 64, 64)
    log_mass, centroid = summarise(k, v, layer.beta)
    bias = log_mass + layer.offset
    rest = layer.alpha * q + bias.unsqueeze(2) + log_share(keep)
    mass = dense_core(q, k, torch.zeros_like(v), keep, rest, torch.ones_like(centroid))
    assert mass.mean().item() == pytest.approx(1 - 128 / 512, abs=0.02)


def test_shifted_blocks_do_not_wrap():
    q, k, v = torch.randn(3, 2, 64, 2, 16).unbind()
    home = (torch.arange(64) + 8) // 16
    mask = home[:, None] == home
    parts = (x.transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*parts, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(in_shifted_blocks(q, k, v, 16), expected)


def test_the_convolution_is_one():
    v, weight = torch.randn(2, 20, 6), torch.randn(5, 6)
    expected = F.conv1d(v.mT, weight.T[:, None], padding=2, groups=6).mT
    torch.testing.assert_close(convolve(v, weight), expected)


def test_variants_share_their_start_and_their_data():
    models, batches = [], []
    tokens = torch.arange(1000)
    for name in ("softmax", "diag/half+conv"):
        torch.manual_seed(3)
        models.append(dict(MaskedEncoder(SIZES, Variant.parse(name)).named_parameters()))
        cell = keys_training.KeysCell(name, 3, SIZES, batch_tokens=128)
        batches.append(next(training_batches(cell, tokens)))
    for name, parameter in models[0].items():
        assert torch.equal(parameter, models[1][name]), name
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["dense", "diag/half/lln", "diag+convolution", "diag/half+keys"])
def test_unknown_variants_are_refused(name):
    with pytest.raises(SystemExit, match="give A or A/B"):
        Variant.parse(name)


def test_a_run_is_written_skipped_and_reported(tmp_path, capsys):
    for part, count in (("train", 5000), ("valid", 700)):
        np.save(tmp_path / f"{part}.npy", np.arange(count, dtype=np.uint16) % 49 + 1)
    (tmp_path / "about.json").write_text(json.dumps({"vocabulary": 50}))
    sizes = "--length 64 --block 16 --keys 8 --layers 2 --width 32 --heads 2 --steps 3"
    words = [*sizes.split(), "--batch-tokens", "256", "--valid-tokens", "512", "--device", "cpu"]
    words += ["--no-bf16", "--no-compile", "--tokens-folder", str(tmp_path)]
    out = tmp_path / "results"
    command = ["run", *words, "--variant", "diag,diag/half+conv", "--seeds", "0", "1"]
    keys_training.main([*command, "--out", str(out)])
    assert len(list(out.glob("*.json"))) == 4
    stored = json.loads((out / "diag-half_conv.n64.k8.t3.seed1.json").read_text("utf-8"))
    assert math.isfinite(stored["valid_loss"])
    assert [step for step, _ in stored["curve"]] == [3]
    assert len(stored["learned"]) == 3
    capsys.readouterr()
    keys_training.main([*command, "--out", str(out)])
    assert not capsys.readouterr().out
    with pytest.raises(SystemExit, match="another training"):
        keys_training.main([*command, "--out", str(out), "--rate", "0.1"])
    keys_training.main(["report", "--out", str(out)])
    assert "| diag/half+conv | 8 | 64 | 3 | 2 | " in capsys.readouterr().out


def test_the_command_in_a_result_names_no_folder():
    words = ["run", "--tokens-folder", "/a/b", "--steps", "3", "--out", "/c"]
    said = keys_training.without_folders(words)
    assert said == ["run", "--tokens-folder", "TOKENS", "--steps", "3", "--out", "RESULTS"]
    assert keys_training.without_folders([]) == []
