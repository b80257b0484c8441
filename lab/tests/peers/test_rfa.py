"""RFA: its kernel on average, its formula, its pool."""

import math

import pytest
import torch
from lab.tests.peers.contract import HEADS, WIDTH, build, tokens

from lln.errors import InvalidInputError

D = WIDTH // HEADS


def unit(x):
    return x / (x.norm(dim=-1, keepdim=True) + 1e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("compat", [None, "released"])
def test_agrees_with_the_formula(compat, causal):
    # So cold that some rows of few keys come out negative.
    core = build("rfa", compat=compat, temperature=0.5, is_causal=causal).core
    with torch.no_grad():
        core.sigma.add_(0.2 * torch.randn_like(core.sigma))
    query, key, value = torch.randn(3, 2, HEADS, 70, D, dtype=torch.float64)
    found = core(query, key, value).detach()
    constant, least = (0.1, 1.0) if compat else (12**-0.5, math.exp(-2 / 0.5**2))
    for head in range(HEADS):
        weights = core.pool[head] * core.sigma[head].detach() / 0.5
        # sin a sin b + cos a cos b = cos(a − b)
        angle_q, angle_k = unit(query[:, head]) @ weights.T, unit(key[:, head]) @ weights.T
        kernel = constant**2 * (angle_q[:, :, None] - angle_k[:, None]).cos().sum(-1)
        if causal:
            kernel = kernel.tril()
        mass = kernel.sum(-1, keepdim=True)
        assert (mass < -least).any() or compat or not causal
        mass = mass.abs().clamp(min=least)
        torch.testing.assert_close(found[:, head], kernel / mass @ value[:, head])


def test_the_kernel_is_that_of_softmax_on_the_sphere():
    tau, draws = 1.2, 4000
    core = build("rfa", features=64, pool=draws, temperature=tau, dtype=torch.float32).core
    query, key = torch.nn.functional.normalize(torch.randn(2, 6, D), dim=-1)
    angle = (query - key) @ core.pool.mT / tau
    found = math.exp(1 / tau**2) * angle.cos().mean((0, 2))
    exact = ((query * key).sum(-1) / tau**2).exp()
    torch.testing.assert_close(found, exact, rtol=0.01, atol=0)


def features_at(core, query, key):
    phi_q, phi_k = core.features(query, key, None)
    return math.e * (phi_q * phi_k).sum(-1)


def test_the_error_falls_with_the_root_of_the_features():
    query, key = torch.nn.functional.normalize(torch.randn(2, 1, HEADS, 200, D), dim=-1)
    exact = (query * key).sum(-1).exp()
    errors = []
    for features in (16, 256):
        core = build("rfa", features=features, dtype=torch.float32).core
        runs = []
        for seed in range(20):
            torch.manual_seed(seed)
            core.pool.normal_()
            runs.append((features_at(core, query, key) / exact - 1).square().mean())
        errors.append(torch.stack(runs).mean().sqrt().item())
    # The 10⁻³ in the norm leaves a bias far below either error.
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.2)


def test_training_takes_matrices_from_the_pool_and_eval_the_first():
    layer, x = build("rfa"), tokens()
    torch.manual_seed(0)
    calm = layer(x)
    assert torch.equal(layer(x), calm)
    layer.train()
    runs = [layer(x) for _ in range(4)]
    assert any(not torch.equal(runs[0], run) for run in runs[1:])
    with torch.no_grad():
        # A pool of copies leaves no choice.
        layer.core.pool.copy_(layer.core.pool[:1].expand_as(layer.core.pool))
    assert torch.equal(layer(x), layer.eval()(x))


def test_the_released_denominator_shrinks_short_sequences():
    query = torch.randn(1, HEADS, 1, D, dtype=torch.float64)
    one = torch.ones(1, HEADS, 1, 1, dtype=torch.float64)
    torch.testing.assert_close(build("rfa", features=64).core.matrix(query, query).detach(), one)
    released = build("rfa", features=64, compat="released").core
    torch.testing.assert_close(released.matrix(query, query).detach(), 0.64 * one)


def test_options_that_do_not_fit_are_refused():
    for options, said in (
        ({"features": 0}, "features"),
        ({"pool": 1}, "each of the 2 heads"),
        ({"temperature": 0.0}, "temperature"),
        ({"compat": "other"}, "compat"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            build("rfa", **options)


def test_a_low_temperature_leaves_a_floor_to_divide_by():
    # e^{−2/τ²} is 0 in float32.
    layer = build("rfa", temperature=0.1, dtype=torch.float32)
    x = tokens(dtype=torch.float32).requires_grad_()
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[1] = False
    layer(x, mask).sum().backward()
    assert x.grad.isfinite().all()
    for label, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all(), label
