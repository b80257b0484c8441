"""Whether the same call gives the same bits twice: on a CPU always, on a GPU as the cards say."""

import functools
import re
from pathlib import Path

import pytest
import torch
from lab.tests.peers.contract import build, some_padding, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from lln_lab import peers

NAMES = peers.available()
aten = torch.ops.aten

# What adds floats in whichever order threads arrive on a GPU, unless told not to
# (`torch.use_deterministic_algorithms`), beside the gradient of fused softmax attention.
ANY_ORDER_ON_A_GPU = {
    aten.convolution_backward,
    aten.index_add,
    aten.index_add_,
    aten.scatter_add,
    aten.scatter_add_,
    aten.scatter_reduce,
    aten.scatter_reduce_,
}
# What does so on a CPU with several threads: the gradient of an index.
ANY_ORDER_ON_A_CPU = {aten.index_put, aten.index_put_, aten._index_put_impl_, aten.put_}


class Called(TorchDispatchMode):
    """The operators that were given floats."""

    def __init__(self):
        super().__init__()
        self.operators = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if isinstance(args[0] if args else None, torch.Tensor) and args[0].is_floating_point():
            self.operators.add(func.overloadpacket)
        return func(*args, **(kwargs or {}))


def every_way(name):
    """A layer and a mask: bidirectional and causal, in training and evaluation, with padding."""
    for is_causal in sorted({False, peers.card(name).causal}):
        for is_training in (False, True):
            for mask in (None, some_padding()):
                layer = build(name, is_causal=is_causal, dtype=torch.float32)
                yield layer.train(is_training), mask


def run(layer, mask):
    """Output and all gradients, from the same draws every time."""
    torch.manual_seed(4)
    x = tokens(dtype=torch.float32).requires_grad_()
    layer.zero_grad()
    out = layer(x, mask)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(weight.grad for weight in layer.parameters())]


@functools.cache
def called_by(name):
    """Every operator of a system, and whether it calls fused softmax attention."""
    attend, is_fused = torch.nn.functional.scaled_dot_product_attention, False

    def noticed(*inputs, **options):
        nonlocal is_fused
        is_fused = True
        return attend(*inputs, **options)

    with pytest.MonkeyPatch.context() as patch, Called() as called:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", noticed)
        for layer, mask in every_way(name):
            run(layer, mask)
    assert aten.mm in called.operators, "nothing was seen"
    return called.operators, is_fused


@pytest.fixture
def restores_the_switch():
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.slow
@pytest.mark.usefixtures("restores_the_switch")
@pytest.mark.parametrize("name", NAMES)
def test_deterministic_algorithms_change_nothing_on_a_cpu(name):
    for first, second in zip(every_way(name), every_way(name), strict=True):
        torch.use_deterministic_algorithms(False)
        expected = run(*first)
        # Memory nobody has written to is filled with NaN as well, so reading it shows.
        torch.use_deterministic_algorithms(True)
        assert all(map(torch.equal, run(*second), expected))


@pytest.mark.parametrize("name", NAMES)
def test_every_order_of_adding_is_fixed_on_a_cpu(name):
    # By the operators: at this size torch has no use for several threads.
    operators, _ = called_by(name)
    assert not operators & ANY_ORDER_ON_A_CPU


@pytest.mark.parametrize("name", NAMES)
def test_cards_say_what_repeats_on_a_gpu(name):
    operators, is_fused = called_by(name)
    repeats = not operators & ANY_ORDER_ON_A_GPU and not is_fused
    assert peers.card(name).repeats_on_gpu == repeats


def test_the_page_names_what_differs_on_a_gpu():
    page = (Path(__file__).parents[3] / "docs" / "peers.md").read_text(encoding="utf-8")
    listed = page.split("**The same bits twice.**")[1].split("`torch.use_deterministic")[0]
    differing = [name for name in NAMES if not peers.card(name).repeats_on_gpu]
    assert set(re.findall(r"`([a-z_0-9]+)`", listed)) == set(differing)


def test_what_the_operators_are_seen_by():
    x = torch.ones(4, requires_grad=True)
    picks = (
        (lambda: x[torch.tensor([0, 0])], ANY_ORDER_ON_A_CPU),
        (lambda: x.gather(0, torch.tensor([0, 0])), ANY_ORDER_ON_A_GPU),
        (lambda: x.index_select(0, torch.tensor([0, 0])), ANY_ORDER_ON_A_GPU),
        (lambda: x.unfold(0, 2, 1), set()),
    )
    for pick, expected in picks:
        with Called() as called:
            pick().sum().backward()
        found = called.operators & (ANY_ORDER_ON_A_CPU | ANY_ORDER_ON_A_GPU)
        assert bool(found) == bool(expected)
        assert found <= expected
