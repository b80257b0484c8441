"""Wide values in slices: every slice writes its channels of the output and of dv in place."""

import pytest
import torch
from tests.kernels.common import DEVICE, compare, limit_chips

import lln
from lln.kernels.lln import slices
from lln.testing import make_qkv

WIDE = {"tokens": 40, "value_width": 40}


@pytest.fixture(autouse=True)
def sixteen_channels(monkeypatch):
    """Every call takes slices of 16 channels."""
    room = {"summary_float32": 16 * 16, "joint_summary_float32": 16 * 16}
    limit_chips(monkeypatch, **room)
    monkeypatch.setattr("lln.kernels.launching.limits.MAX_CAUSAL_SUMMARY", 16 * 16)


@pytest.fixture
def widths(monkeypatch):
    """The channels of every slice that a test reads."""
    found, cut = [], slices.cut

    def note(tensors, width):
        for part, own in cut(tensors, width):
            found.append(own[2].shape[-1])
            yield part, own

    monkeypatch.setattr(slices, "cut", note)
    return found


MIXES = {"row": (2, 1, 40, 1), "channel": (1, 1, 1, 40), "both": (2, 1, 40, 40)}
CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "shared values": {"heads": 4, "key_heads": 2},
    "tokens first": {"layout": "transposed"},
    "temperatures": {"extra": {name: torch.rand(2, 1, 1, 1) + 1 for name in ("alpha", "beta")}},
    **{
        f"mix per {name}": {"block_size": 16, "extra": {"mix": torch.rand(shape)}}
        for name, shape in MIXES.items()
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_outputs_and_gradients(widths, name):
    compare(**WIDE, **CALLS[name])
    # Forward and backward.
    assert widths[:3] == [16, 16, 8]
    assert len(widths) >= 6


def test_without_gradient(widths):
    query, key, value = make_qkv(2, 2, 40, 16, value_width=40, device=DEVICE)
    out = lln.lln_attention(query, key, value, alpha=2.0, beta=2.0, impl="triton")
    wide = [side.double() for side in (query, key, value)]
    expected = lln.lln_attention(*wide, alpha=2.0, beta=2.0, impl="eager")
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert widths == [16, 16, 8]


def test_a_call_like_a_slice_keeps_its_own_output():
    """Launches are prepared once per kind of call, and outputs lie in memory differently."""
    query, key, value = make_qkv(1, 2, 40, 16, value_width=40, device=DEVICE)
    given = {"alpha": 2.0, "beta": 2.0, "impl": "triton"}
    whole = lln.lln_attention(query, key, value, **given)
    part = lln.lln_attention(query, key, value[..., :16], **given)
    assert torch.equal(part, whole[..., :16])


def test_no_second_derivative():
    inputs = make_qkv(1, 1, 20, 16, value_width=40, device=DEVICE, requires_grad=True)
    out = lln.lln_attention(*inputs, alpha=2.0, beta=2.0, impl="triton")
    (dq,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()
