"""The decoding kernel: equal to causal attention over everything so far, step by step."""

import pytest
import torch
from tests.kernels.common import DEVICE, DTYPES, ON_GPU

import lln
from lln.testing import assert_close, make_qkv


def decoded(inputs, alpha, beta, impl, heads=None):
    query, key, value = inputs
    batch, key_heads = key.shape[:2]
    summary = lln.KeySummary.empty(
        batch, heads or key_heads, key.shape[3], value.shape[3], beta, device=DEVICE
    )
    outs = [
        lln.decode_step(
            *(tensor[:, :, step : step + 1] for tensor in inputs), summary, alpha=alpha, impl=impl
        )
        for step in range(query.shape[2])
    ]
    return torch.cat(outs, 2), summary


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("width", "value_width"), [(16, 16), (24, 72), (256, 256)] if ON_GPU else [(16, 16), (24, 72)]
)
def test_steps_equal_causal_attention(dtype, width, value_width):
    inputs = make_qkv(2, 4, 12, width, key_heads=2, value_width=value_width, dtype=dtype,
                      device=DEVICE)  # fmt: skip
    options = {"alpha": 2.0, "beta": 2.0, "is_causal": True, "enable_gqa": True}
    expected = lln.lln_attention(*(t.double() for t in inputs), impl="reference", **options)
    eager = lln.lln_attention(*inputs, impl="eager", **options)
    found, summary = decoded(inputs, 2.0, 2.0, "triton")
    assert_close(found, expected, eager)
    whole = lln.KeySummary.of(*inputs[1:], 2.0)
    torch.testing.assert_close(summary.log_mass, whole.log_mass, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(summary.centroid, whole.centroid, rtol=1e-4, atol=1e-5)


def test_temperatures_per_head():
    inputs = make_qkv(2, 4, 6, 16, device=DEVICE)
    alpha, beta = (torch.rand(2, 4, 1, 1).to(DEVICE) + 1 for _ in range(2))
    expected, _ = decoded(inputs, alpha, beta, "eager")
    found, _ = decoded(inputs, alpha, beta, "triton")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_many_steps_do_not_drift():
    inputs = make_qkv(1, 1, 2000 if ON_GPU else 60, 16, device=DEVICE)
    found, _ = decoded(inputs, 2.0, 2.0, "triton")
    options = {"alpha": 2.0, "beta": 2.0, "is_causal": True}
    expected = lln.lln_attention(*(t.double() for t in inputs), impl="reference", **options)
    # Both round L at every step; a kernel may not drift further than plain PyTorch.
    eager, _ = decoded(inputs, 2.0, 2.0, "eager")
    assert_close(found, expected, eager)


def test_earlier_tensors_are_not_written_to():
    query, key, value = make_qkv(1, 2, 1, 16, device=DEVICE)
    summary = lln.KeySummary.empty(1, 2, 16, 16, 2.0, device=DEVICE)
    before = summary.centroid
    lln.decode_step(query, key, value, summary, alpha=2.0, impl="triton")
    assert torch.equal(before, torch.zeros_like(before))
    assert summary.centroid is not before


def test_gradients_take_the_plain_form():
    query, key, value = make_qkv(1, 2, 1, 16, device=DEVICE, requires_grad=True)
    summary = lln.KeySummary.empty(1, 2, 16, 16, 2.0, device=DEVICE)
    with pytest.raises(lln.BackendUnavailableError, match="without gradients"):
        lln.decode_step(query, key, value, summary, alpha=2.0, impl="triton")
    out = lln.decode_step(query, key, value, summary, alpha=2.0, impl="eager")
    (gradient,) = torch.autograd.grad(out.sum(), value)
    torch.testing.assert_close(gradient, torch.ones_like(gradient))
