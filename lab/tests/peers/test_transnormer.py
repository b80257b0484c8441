"""TransNormer's four attentions against dense formulas, and the invariances of its card."""

import pytest
import torch
from lab.tests.peers import contract, test_contract
from torch.nn import functional as F

from lln import reference
from lln.errors import InvalidInputError
from lln_lab import peers
from lln_lab.peers.gated import srms

NAMES = ["transnormer_t1", "transnormer_t2"]
both = pytest.mark.parametrize("name", NAMES)
HALVES = {"local": 0, "linear": 1}


def build(name, half, **options):
    """A layer of the lower or the upper half with weights that make attention matter."""
    layer = peers.build(
        name,
        embed_dim=12,
        num_heads=2,
        max_len=32,
        layer=HALVES[half],
        layers=2,
        **{"chunk": 8, **options},
    ).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return layer


def placed(layer, rows, place):
    """LRPE by complex numbers, token after token."""
    mirror = layer.positions.mirror / layer.positions.mirror.norm()
    rows = rows - 2 * torch.outer(rows @ mirror, mirror)
    pairs = torch.view_as_complex(rows.reshape(len(rows), -1, 2).contiguous())
    turns = torch.tensor(place)[:, None] * layer.positions.angles
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(turns), turns)).flatten(1)


def dense(name, half, layer, x, real, causal):
    """One sample: the N×N matrix of every head, the norm over all heads, the projection."""
    tokens = len(x)
    sides = (part(x).unflatten(-1, (2, 6)) for part in (layer.query, layer.key, layer.value))
    query, key, value = sides
    rows = torch.arange(tokens)
    allowed = real.expand(tokens, tokens).clone()
    if causal:
        allowed &= rows[:, None] >= rows
    if half == "local":
        allowed &= rows[:, None] // 8 == rows // 8
    heads = []
    for head in range(2):
        if half == "local":
            places = (rows % 8).tolist()
            q, k = (placed(layer, side[:, head], places) for side in (query, key))
            scores = q @ k.T / 6**0.5
            if name == "transnormer_t1":
                weights = scores.clamp_min(0) * allowed
            else:
                weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
        else:
            shift = 0.0 if name == "transnormer_t1" else 1.0
            q, k = (
                placed(layer, F.elu(side[:, head]) + shift, rows.tolist()) for side in (query, key)
            )
            weights = (q @ k.T) * allowed
        heads.append(weights @ value[:, head])
    out = torch.cat(heads, -1)
    if not (name == "transnormer_t2" and half == "local"):
        out = out / (out.square().mean(-1, keepdim=True).sqrt() + 1e-8)
    return layer.out(out)


@both
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [5, 16, 29])
def test_attention_agrees_with_the_dense_formula(name, half, causal, tokens):
    layer = build(name, half, is_causal=causal)
    x = torch.randn(2, tokens, 12, dtype=torch.float64)
    holes = torch.rand(2, tokens, generator=torch.Generator().manual_seed(1)) < 0.7
    for mask in (None, holes):
        found = layer.attend(x, mask)
        for sample in range(2):
            real = torch.ones(tokens, dtype=torch.bool) if mask is None else mask[sample]
            expected = dense(name, half, layer, x[sample], real, causal)
            torch.testing.assert_close(found[sample][real], expected[real])


@both
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [5, 16, 29])
def test_released_code_masks_nothing(name, half, causal, tokens):
    layer = build(name, half, compat="released", is_causal=causal)
    x = torch.randn(2, tokens, 12, dtype=torch.float64)
    found = layer.attend(x, None)
    holes = torch.rand(2, tokens, generator=torch.Generator().manual_seed(1)) < 0.7
    assert torch.equal(layer.attend(x, holes), found)
    plain = build(name, half, is_causal=causal)
    plain.load_state_dict(layer.state_dict())
    if (name, half, causal) != ("transnormer_t2", "local", False) or tokens == 16:
        torch.testing.assert_close(found, plain.attend(x, None))
        return
    # Zero keys have a score of 0 and a value of 0: they only add to the softmax's sum.
    filling = -tokens % 8
    for sample in range(2):
        heads = []
        for head in range(2):
            query, key, value = (
                part(x[sample]).unflatten(-1, (2, 6))[:, head]
                for part in (layer.query, layer.key, layer.value)
            )
            places = (torch.arange(tokens) % 8).tolist()
            scores = placed(layer, query, places) @ placed(layer, key, places).T / 6**0.5
            block = torch.arange(tokens) // 8
            weights = scores.exp() * (block[:, None] == block)
            last = (block == block[-1]).double() * filling
            heads.append(weights @ value / (weights.sum(-1) + last)[:, None])
        torch.testing.assert_close(found[sample], layer.out(torch.cat(heads, -1)))


@both
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("compat", [None, "released"])
def test_the_layer_is_two_normed_residuals(name, half, compat):
    layer = build(name, half, compat=compat)
    x = torch.randn(2, 10, 12, dtype=torch.float64)
    hidden = x + layer.attend(x, None)
    hidden = hidden / hidden.square().mean(-1, keepdim=True).sqrt()
    gate = layer.glu.gate(hidden)
    if compat is None:
        gate = gate * gate.sigmoid()
    hidden = hidden + layer.glu.down(gate * layer.glu.up(hidden))
    expected = hidden / hidden.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)
    assert layer.glu.up.out_features == 32


@both
def test_the_first_half_of_the_layers_is_local(name):
    sizes = {"embed_dim": 12, "num_heads": 2, "max_len": 32}
    local = [peers.build(name, layer=i, layers=6, **sizes).is_local for i in range(6)]
    assert local == [True] * 3 + [False] * 3


@both
def test_norm_attention_ignores_the_scale_of_values(name):
    layer, x = build(name, "linear"), torch.randn(1, 20, 12, dtype=torch.float64)
    before = layer.attend(x, None)
    with torch.no_grad():
        layer.value.weight *= 7.0
        layer.value.bias *= 7.0
    torch.testing.assert_close(layer.attend(x, None), before, rtol=1e-6, atol=1e-6)


@both
def test_norm_attention_without_positions_ignores_repetition(name):
    layer, x = build(name, "linear", lrpe=False), torch.randn(1, 20, 12, dtype=torch.float64)
    twice = layer.attend(torch.cat((x, x), 1), None)
    torch.testing.assert_close(twice[:, :20], layer.attend(x, None), rtol=1e-6, atol=1e-6)
    with_positions = build(name, "linear")
    twice = with_positions.attend(torch.cat((x, x), 1), None)
    assert (twice[:, :20] - with_positions.attend(x, None)).abs().max() > 1e-3


def test_one_chunk_of_t2_is_softmax_attention():
    layer = build("transnormer_t2", "local", lrpe=False, chunk=32)
    x = torch.randn(2, 20, 12, dtype=torch.float64)
    query, key, value = (
        part(x).unflatten(-1, (2, 6)).transpose(1, 2)
        for part in (layer.query, layer.key, layer.value)
    )
    expected = reference.softmax_attention(query, key, value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer.attend(x, None), layer.out(expected))


@both
def test_chunks_do_not_see_each_other(name):
    layer, x = build(name, "local"), torch.randn(1, 24, 12, dtype=torch.float64)
    changed = x.clone()
    changed[:, 8:16] += 1.0
    moved = (layer(changed) - layer(x)).abs().amax(-1)[0] > 1e-9
    assert moved.tolist() == [False] * 8 + [True] * 8 + [False] * 8
    part = layer(x[:, 8:16])
    torch.testing.assert_close(layer(x)[:, 8:16], part)


@both
def test_attention_in_bfloat16_follows_float32(name):
    for half in HALVES:
        rounded = build(name, half).bfloat16()
        x = torch.randn(2, 30, 12).bfloat16()
        out = rounded.attend(x, None).float()
        exact = rounded.float().attend(x.float(), None)
        assert (out - exact).norm() / exact.norm() < 0.03


@pytest.mark.parametrize(
    "promise",
    [
        test_contract.test_what_padded_tokens_hold_never_matters,
        test_contract.test_longer_padding_changes_no_real_token,
        test_contract.test_a_sequence_without_real_tokens_is_zero,
        test_contract.test_samples_do_not_see_each_other,
        test_contract.test_state_dict_round_trip,
        test_contract.test_bfloat16_follows_float32,
    ],
)
@both
def test_the_other_half_keeps_the_contract(name, promise, monkeypatch):
    other = 1 - contract.SMALL[name]["layer"]
    monkeypatch.setitem(contract.SMALL, name, {"chunk": 16, "layer": other, "layers": 2})
    promise(name)


def test_srms_of_nothing_has_a_finite_gradient():
    zero = torch.zeros(2, 4, requires_grad=True)
    srms(zero).sum().backward()
    assert zero.grad.isfinite().all()


@both
def test_bad_options_get_a_sentence(name):
    for options, said in (
        ({"chunk": 0}, "chunk"),
        ({"compat": "other"}, "'released'"),
        ({"num_heads": 4}, "even"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            peers.build(name, **{"embed_dim": 12, "num_heads": 2, "max_len": 8, **options})
