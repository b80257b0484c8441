"""The instruments on a GPU: the same numbers as on the CPU, and results on the inputs' device."""

import pytest
import torch
from tests.instruments.dense import KINDS

from lln import choose_keys, instruments
from lln.instruments import of_matrix
from lln.testing import make_qkv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MEASURES = ("entropy", "variance", "temperature", "log_normality", "score_variance", "spectral_gap")


def tensors(found):
    return [found] if isinstance(found, torch.Tensor) else list(found)


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_on_both_devices(kind, dtype, is_causal):
    pytest.importorskip("scipy")
    query, key, _ = make_qkv(2, 4, 200, 32, key_heads=2, dtype=dtype, scale=1.3)
    keep = torch.ones(2, 200, dtype=torch.bool)
    keep[1, 130:] = False
    options = {"kind": kind, "is_causal": is_causal, "alpha": 1.9, "beta": 2.1}
    there = {}
    if kind == "lln_keys":
        # Chosen once: of keys with nearly equal scores every device may take another.
        chosen = choose_keys(query, key, 8, key_mask=keep, is_causal=is_causal, enable_gqa=True)
        options |= {"keys": chosen, "offset": 0.5}
        there["keys"] = chosen.cuda()
    for name in MEASURES:
        measure = getattr(instruments, name)
        on_cpu = measure(query, key, key_mask=keep, **options)
        on_gpu = measure(query.cuda(), key.cuda(), key_mask=keep.cuda(), **options | there)
        for cpu, gpu in zip(tensors(on_cpu), tensors(on_gpu), strict=True):
            assert gpu.is_cuda
            torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-6, atol=1e-8, msg=name)


def test_packed_and_matched():
    query, key, _ = make_qkv(1, 3, 90, 16, device="cuda")
    packed = [side[0].transpose(0, 1) for side in (query, key)]
    bounds = torch.tensor([0, 30, 90], device="cuda")
    found = instruments.entropy(*packed, kind="lln_diag", cu_seqlens=bounds)
    expected = instruments.entropy(
        *(side.cpu() for side in packed), kind="lln_diag", cu_seqlens=bounds.cpu()
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-8)


def test_a_given_matrix():
    matrix = torch.rand(3, 150, 150).softmax(-1)
    for name in ("entropy", "variance", "temperature", "log_normality"):
        measure = getattr(of_matrix, name)
        for cpu, gpu in zip(tensors(measure(matrix)), tensors(measure(matrix.cuda())), strict=True):
            assert gpu.is_cuda
            torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-6, atol=1e-9)


def test_gaps_of_a_given_matrix():
    pytest.importorskip("scipy")
    matrix = torch.rand(3, 150, 150).softmax(-1)
    sparse = torch.eye(150).roll(1, 0)
    for own in (matrix, sparse, matrix.tril() / matrix.tril().sum(-1, keepdim=True)):
        found = of_matrix.spectral_gap(own.cuda())
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), of_matrix.spectral_gap(own), rtol=0, atol=1e-8)
