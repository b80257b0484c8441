"""Derivatives that the kernels lack are refused or left to plain PyTorch, never given as zero."""

import pytest
import torch
from tests.kernels.common import DEVICE

import lln
from lln.testing import make_qkv

FUNCTIONS = {
    "lln": lambda *a, **o: lln.lln_attention(*a, alpha=1.0, beta=1.0, **o),
    "causal": lambda *a, **o: lln.lln_attention(*a, alpha=1.0, beta=1.0, is_causal=True, **o),
    "lln_diag": lambda *a, **o: lln.lln_diag_attention(*a, alpha=1.0, beta=1.0, **o),
    "block": lambda *a, **o: lln.block_diagonal_attention(*a, block_size=8, **o),
}
every_function = pytest.mark.parametrize("name", FUNCTIONS)


@every_function
def test_a_second_derivative_is_refused(name):
    inputs = make_qkv(1, 2, 20, 16, device=DEVICE, requires_grad=True)
    out = FUNCTIONS[name](*inputs, impl="triton")
    gradients = torch.autograd.grad(out.sum(), inputs, create_graph=True)
    penalty = sum(gradient.square().sum() for gradient in gradients)
    with pytest.raises(RuntimeError, match=r"no second derivative; use impl='eager'"):
        penalty.backward()


@every_function
def test_transforms_are_refused_or_left_to_pytorch(name):
    query, key, value = make_qkv(1, 2, 20, 16, device=DEVICE)

    def attend(impl):
        return lambda side: FUNCTIONS[name](side, key, value, impl=impl)

    for transform in (
        lambda f: torch.func.grad(lambda side: f(side).sum())(query),
        lambda f: torch.func.jvp(f, (query,), (query,)),
        lambda f: torch.func.vmap(f)(query[None]),
    ):
        with pytest.raises(lln.BackendUnavailableError, match=r"torch.func's transforms"):
            transform(attend("triton"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:lln runs in plain PyTorch")
@every_function
def test_transforms_on_a_gpu_are_those_of_plain_pytorch(name):
    query, key, value = make_qkv(1, 2, 20, 16, device="cuda")
    found, expected = (
        torch.func.jvp(
            lambda side, impl=impl: FUNCTIONS[name](side, key, value, impl=impl),
            (query,),
            (query,),
        )[1]
        for impl in ("auto", "eager")
    )
    assert torch.equal(found, expected)
    assert found.abs().max() > 0.1
