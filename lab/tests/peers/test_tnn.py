"""TNN against dense Toeplitz matrices, and what its kept spectrum must notice."""

import copy

import pytest
import torch
from torch.nn import functional as F

from lln.errors import InvalidInputError
from lln_lab import peers


def build(**options):
    sizes = {"embed_dim": 6, "num_heads": 2, "max_len": 32, "rpe_width": 8, "rpe_layers": 2}
    return peers.build("tnn", **{**sizes, **options}).double()


def rms_normed(x):
    return x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-8)


def entry(layer, distance, gamma, causal):
    """t_r of all channels, through the network written out."""
    network = layer.toeplitz.network
    if causal and distance < 0:
        return torch.zeros(network.last.out_features, dtype=torch.float64)
    hidden = network.first(torch.tensor([float(distance)], dtype=torch.float64))
    for part in [*network.hidden, network.last]:
        hidden = part(rms_normed(hidden).clamp_min(0))
    return gamma ** abs(distance) * hidden


def dense(layer, x, real, gamma=0.99, causal=False):
    """One sample, token after token."""
    value = F.silu(layer.value(x))
    mixed = torch.stack(
        [
            sum(entry(layer, i - j, gamma, causal) * value[j] for j in range(len(x)) if real[j])
            for i in range(len(x))
        ]
    )
    x = rms_normed(x + layer.out(F.silu(layer.gate(x)) * mixed))
    return rms_normed(x + layer.glu.down(F.silu(layer.glu.gate(x)) * layer.glu.up(x)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 13])
def test_agrees_with_the_dense_formula(tokens, causal):
    layer = build(is_causal=causal, gamma=0.9)
    x = torch.randn(2, tokens, 6, dtype=torch.float64)
    mask = torch.ones(2, tokens, dtype=torch.bool)
    mask[1, 1::3] = False
    for given in (None, mask):
        found = layer(x, given)
        for sample in range(2):
            real = mask[sample] if given is not None else torch.ones_like(mask[0])
            expected = dense(layer, x[sample] * real[:, None], real, 0.9, causal)
            torch.testing.assert_close(found[sample][real], expected[real])


def test_sizes_are_those_of_the_paper():
    layer = peers.build("tnn", embed_dim=6, num_heads=1, max_len=8)
    network = layer.toeplitz.network
    assert [network.first.out_features, len(network.hidden)] == [64, 6]
    assert network.last.out_features == layer.gate.out_features == 18
    assert layer.glu.up.out_features == 6
    assert layer.toeplitz.gamma == 0.99


@pytest.fixture
def counted(monkeypatch):
    """A layer in evaluation, and how often its network has run."""
    layer, runs = build().eval(), []
    network = layer.toeplitz.network
    forward = type(network).forward
    monkeypatch.setattr(
        type(network), "forward", lambda self, r: runs.append(len(r)) or forward(self, r)
    )
    return layer, runs


@torch.no_grad()
def test_evaluation_makes_the_entries_once(counted):
    layer, runs = counted
    x = torch.randn(1, 9, 6, dtype=torch.float64)
    first = layer(x)
    assert torch.equal(layer(x), first)
    assert runs == [17]
    layer(x[:, :5])
    layer(x[:, :5])
    assert runs == [17, 9]


def test_gradients_never_come_from_what_was_kept(counted):
    layer, runs = counted
    x = torch.randn(1, 9, 6, dtype=torch.float64)
    with torch.no_grad():
        layer(x)
    for _ in range(2):
        layer.zero_grad()
        layer(x).sum().backward()
        assert layer.toeplitz.network.last.weight.grad.abs().max() > 0
    assert len(runs) == 3


def changes():
    """Everything that may change the weights between two evaluations."""

    def load(layer, other):
        layer.load_state_dict(other.state_dict())

    def assign(layer, other):
        layer.load_state_dict(other.state_dict(), assign=True)

    def in_place(layer, other):
        for mine, its in zip(layer.parameters(), other.parameters(), strict=True):
            mine.copy_(its)

    def by_data(layer, other):
        layer.train()
        for mine, its in zip(layer.parameters(), other.parameters(), strict=True):
            mine.data.copy_(its)
        layer.eval()

    def swapped(layer, other):
        for mine, its in zip(layer.parameters(), other.parameters(), strict=True):
            mine.data = its.detach().clone()

    return [load, assign, in_place, by_data, swapped]


@pytest.mark.parametrize("change", changes(), ids=lambda change: change.__name__)
@torch.no_grad()
def test_changed_weights_are_noticed(change):
    layer, other = build().eval(), build().eval()
    x = torch.randn(1, 9, 6, dtype=torch.float64)
    expected = copy.deepcopy(other)(x)
    assert not torch.equal(layer(x), expected)
    change(layer, other)
    assert torch.equal(layer(x), expected)


@torch.no_grad()
def test_a_cast_and_a_training_step_are_noticed():
    layer = build().eval()
    x = torch.randn(1, 9, 6, dtype=torch.float64)
    before = layer(x)
    torch.testing.assert_close(layer.float()(x.float()).double(), before, rtol=1e-4, atol=1e-4)
    layer.double().train()
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
    with torch.enable_grad():
        layer(x).square().sum().backward()
        layer(x)[0, 0, 0].backward()
    optimiser.step()
    layer.eval()
    found = layer(x)
    assert not torch.equal(found, before)
    with torch.enable_grad():
        assert torch.equal(found, layer(x))


def test_functional_weights_are_used():
    layer, other = build().eval(), build().eval()
    x = torch.randn(1, 9, 6, dtype=torch.float64)
    with torch.no_grad():
        layer(x)
        found = torch.func.functional_call(layer, dict(other.named_parameters()), (x,))
        assert torch.equal(found, other(x))


def test_inference_mode_and_back():
    layer = build().eval()
    x = torch.randn(1, 9, 6, dtype=torch.float64)
    with torch.inference_mode():
        kept = layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x), kept)
    layer(x).sum().backward()
    with torch.inference_mode():
        born_inside = build().eval()
        assert torch.equal(born_inside(x), born_inside(x))


def test_long_distances_survive_bfloat16():
    exact = build(gamma=1.0)
    rounded = copy.deepcopy(exact).bfloat16()
    exact = copy.deepcopy(rounded).float()
    spectra = [layer.toeplitz.spectrum(300, torch.float32) for layer in (rounded, exact)]
    torch.testing.assert_close(*spectra)


def test_bad_options_get_a_sentence():
    for options, said in (
        ({"expansion": 0}, "expansion"),
        ({"gamma": 0.0}, "gamma"),
        ({"gamma": 1.1}, "gamma"),
        ({"rpe_width": 0}, "rpe_width"),
        ({"rpe_layers": -1}, "rpe_layers"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            build(**options)


@pytest.mark.parametrize("causal", [False, True])
def test_no_backend_is_asked_for_the_transform_of_an_empty_batch(monkeypatch, causal):
    """MKL refuses it, others do not: refused here on every machine."""
    layer, x = build(is_causal=causal), torch.randn(0, 9, 6, dtype=torch.float64).requires_grad_()

    def refusing(transform):
        def wrapper(z, *args, **kwargs):
            assert z.numel(), "nothing to transform"
            return transform(z, *args, **kwargs)

        return wrapper

    for name in ("rfft", "irfft"):
        monkeypatch.setattr(torch.fft, name, refusing(getattr(torch.fft, name)))
    out = layer(x)
    out.sum().backward()
    assert out.shape == x.grad.shape == x.shape
    assert all((weight.grad == 0).all() for weight in layer.parameters())
