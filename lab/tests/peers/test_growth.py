"""Work and memory grow as the cards say: counted, not timed, so the same on every machine."""

import math
from functools import partial

import pytest
import torch
from lab.tests.peers.contract import SMALL
from lab.tests.work import work

from lln_lab import peers
from lln_lab.bench.peers_cells import LayerSize, build_layers
from lln_lab.bench.timing import cpu_peak

# So narrow that what grows with N² shows beside the projections.
WIDTH, HEADS = 16, 2
SHORT, LONG = 512, 2048
# N log N is N^1.14 between these lengths, and nobody has as much of it. N √N, diluted by
# projections, is more than N^1.2.
LINEAR, FASTER = 1.1, 1.2


def step(name, length):
    """Forward and backward of a system built for sequences of this length."""
    torch.manual_seed(0)
    small = {k: v for k, v in SMALL.get(name, {}).items() if k not in ("layer", "layers")}
    layers = build_layers(name, LayerSize(WIDTH, HEADS, "float32"), length, **small).train()
    return backward_of(layers, length)


def backward_of(function, length):
    x = torch.randn(1, length, WIDTH, requires_grad=True)
    return lambda: function(x).sum().backward()


def exponent(measure, make):
    few, many = (measure(make(length)) for length in (SHORT, LONG))
    return math.log(many / few) / math.log(LONG / SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("name", peers.available())
def test_work_grows_as_the_card_says(name):
    found = exponent(work, partial(step, name))
    if peers.card(name).is_linear:
        assert found < LINEAR
    else:
        assert found > FASTER


@pytest.mark.parametrize("name", [name for name in peers.available() if peers.card(name).is_linear])
def test_memory_of_linear_systems_grows_linearly(name):
    assert exponent(cpu_peak, partial(step, name)) < LINEAR


def test_what_is_counted():
    def square(x):
        return torch.softmax(x @ x.mT, -1) @ x

    def fused(x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    def without_products(x):
        return (x.unsqueeze(1) - x.unsqueeze(2)).square().sum(1)

    def transform(x):
        return torch.fft.irfft(torch.fft.rfft(x, dim=1), n=x.shape[1], dim=1)

    for function in (square, fused, without_products):
        assert exponent(work, partial(backward_of, function)) > 1.9
    assert exponent(cpu_peak, partial(backward_of, square)) > 1.9
    assert 0.95 < exponent(work, partial(backward_of, transform)) < LINEAR
