"""Work and memory grow as the cards say: counted, not timed, so the same on every machine.

Work is the floating-point operations of products and convolutions (torch's counter) plus every
number that an operator writes. The latter stands for what the counter does not know: elementwise
work, sorting, and Fourier transforms, whose N log N then counts as N.
"""

import math

import pytest
import torch
from tests.peers.contract import SMALL
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lln import peers
from lln.bench.peers_cells import LayerSize, build_layers
from lln.bench.timing import cpu_peak

# So narrow that what grows with N² shows beside the projections.
WIDTH, HEADS = 16, 2
SHORT, LONG = 512, 2048
# N log N is N^1.11 between these lengths, N √N is N^1.5.
LINEAR, FASTER = 1.12, 1.2


class Written(TorchDispatchMode):
    """Counts the numbers that operators write; views write none."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {one.data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        out = func(*args, **(kwargs or {}))
        self.total += sum(
            one.numel()
            for one in tree_leaves(out)
            if isinstance(one, Tensor) and one.data_ptr() not in given
        )
        return out


def layers_of(name):
    torch.manual_seed(0)
    small = {k: v for k, v in SMALL.get(name, {}).items() if k not in ("layer", "layers")}
    return build_layers(name, LayerSize(WIDTH, HEADS, "float32"), LONG, **small).train()


def step(layers, length):
    x = torch.randn(1, length, WIDTH, requires_grad=True)
    return lambda: torch.autograd.grad(layers(x).sum(), (x, *layers.parameters()))


def work(layers, length):
    call = step(layers, length)
    # Fused softmax does not say what it does; written out, it does the same work.
    with (
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as products,
        Written() as all_,
    ):
        call()
    return products.get_total_flops() + all_.total


def exponent(measure, layers):
    few, many = (measure(layers, length) for length in (SHORT, LONG))
    return math.log(many / few) / math.log(LONG / SHORT)


@pytest.mark.parametrize("name", peers.available())
def test_work_grows_as_the_card_says(name):
    found = exponent(work, layers_of(name))
    if peers.card(name).is_linear:
        assert found < LINEAR
    else:
        assert found > FASTER


@pytest.mark.parametrize("name", [name for name in peers.available() if peers.card(name).is_linear])
def test_memory_of_linear_systems_grows_linearly(name):
    layers = layers_of(name)
    assert exponent(lambda layers, length: cpu_peak(step(layers, length)), layers) < LINEAR


def test_what_is_counted():
    class Square(torch.nn.Module):
        def forward(self, x):
            return torch.softmax(x @ x.mT, -1) @ x

    def transform(x):
        return torch.fft.irfft(torch.fft.rfft(x, dim=1), n=x.shape[1], dim=1)

    assert exponent(work, Square()) > 1.9
    assert exponent(lambda layers, length: cpu_peak(step(layers, length)), Square()) > 1.9
    transforming = Square()
    transforming.forward = transform
    assert 0.95 < exponent(work, transforming) < 1.05
