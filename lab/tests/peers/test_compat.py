"""Every ``compat``: what published code does, under as much of the contract as it keeps."""

import typing

import pytest
import torch
from lab.tests.peers.contract import build, tokens

from lln_lab import peers

# Those that docs/peers.md names where it says that the padded length may matter.
SEE_PADDING = {
    ("nystromformer", "released"),
    ("performer", "skyformer"),
    ("transnormer_t1", "released"),
    ("transnormer_t2", "released"),
}


def published():
    """Names and what their ``compat`` may be, read from the signatures."""
    for name in peers.available():
        hint = typing.get_type_hints(peers.find(name).__init__).get("compat")
        for part in typing.get_args(hint):
            for value in typing.get_args(part):
                yield name, value


PUBLISHED = list(published())
every = pytest.mark.parametrize(("name", "compat"), PUBLISHED)


def biased(name, compat, **changes):
    """A layer whose biases are not zero: padded tokens then have keys and values."""
    layer = build(name, compat=compat, **changes)
    with torch.no_grad():
        for label, parameter in layer.named_parameters():
            if label.endswith("bias"):
                parameter.normal_(std=0.5)
    return layer


def test_every_compat_is_found():
    with_option = {
        name
        for name in peers.available()
        if any(option.name == "compat" for option in peers.options_of(name))
    }
    assert {name for name, _ in PUBLISHED} == with_option
    assert set(PUBLISHED) > SEE_PADDING


@every
@pytest.mark.parametrize("length", [1, 17, 40])
def test_shape_and_gradients(name, compat, length):
    layer, x = biased(name, compat, dtype=torch.float32), tokens(length=length).float()
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    mask[1, length // 2 + 1 :] = False
    x.requires_grad_()
    out = layer.train()(x, mask)
    assert out.shape == x.shape
    assert (out[~mask] == 0).all()
    out.square().mean().backward()
    assert x.grad.isfinite().all()
    assert x.grad.abs().max() > 0
    for label, parameter in layer.named_parameters():
        assert parameter.grad is not None, f"{label} is never used"
        assert parameter.grad.isfinite().all(), label


@every
@pytest.mark.parametrize("training", [False, True])
def test_the_same_seed_gives_the_same_numbers(name, compat, training):
    x, found = tokens(), []
    mask = torch.arange(40).expand(2, -1) < torch.tensor([[40], [33]])
    for _ in range(2):
        layer = biased(name, compat, seed=3).train(training)
        # Some draw in evaluation too.
        torch.manual_seed(4)
        found.append(layer(x, mask))
    assert torch.equal(*found)


@every
def test_the_padded_length_matters_only_where_the_page_says_so(name, compat):
    layer, x = biased(name, compat), tokens(length=40)
    longer = torch.cat((x, tokens(length=23, seed=5)), dim=1)
    mask = torch.arange(63).expand(2, -1) < 40
    torch.manual_seed(4)
    alone = layer(x, mask[:, :40])
    torch.manual_seed(4)
    moved = (layer(longer, mask)[:, :40] - alone).abs().max()
    if (name, compat) in SEE_PADDING:
        assert moved > 1e-6
    else:
        assert moved < 1e-10
