"""Nyströmformer against its formula, dense and in float64."""

import pytest
import torch
from torch.nn import functional as F

from lln import reference
from lln.peers.nystromformer import (
    NystromAttention,
    nystrom_attention,
    pseudo_inverse,
    segment_means,
)


def dense(query, key, value, landmarks, inverse):
    """softmax(QK̃ᵀ/√d) Z softmax(Q̃Kᵀ/√d) V of one head, with loops for the means."""
    tokens, width = query.shape
    length = -(-tokens // landmarks)
    starts = range(0, tokens, length)
    few_q = torch.stack([query[i : i + length].mean(0) for i in starts])
    few_k = torch.stack([key[i : i + length].mean(0) for i in starts])
    scale = width**-0.5
    first = torch.softmax(scale * query @ few_k.T, -1)
    middle = torch.softmax(scale * few_q @ few_k.T, -1)
    last = torch.softmax(scale * few_q @ key.T, -1)
    return first @ inverse(middle) @ last @ value


def six_steps(matrix):
    """The iteration as printed in the paper, multiplied out without nesting."""
    eye = torch.eye(len(matrix), dtype=matrix.dtype)
    z = matrix.T / (matrix.abs().sum(0).max() * matrix.abs().sum(1).max())
    for _ in range(6):
        az = matrix @ z
        z = z @ (13 * eye - 15 * az + 7 * az @ az - az @ az @ az) / 4
    return z


@pytest.mark.parametrize("tokens", [1, 5, 8, 24, 30])
def test_agrees_with_the_dense_formula(tokens):
    query, key = torch.randn(2, 2, 3, tokens, 8, dtype=torch.float64)
    value = torch.randn(2, 3, tokens, 5, dtype=torch.float64)
    found = nystrom_attention(query, key, value, landmarks=8)
    for sample in range(2):
        for head in range(3):
            one = (side[sample, head] for side in (query, key, value))
            torch.testing.assert_close(found[sample, head], dense(*one, 8, six_steps))


def test_the_iteration_finds_the_pseudo_inverse():
    matrix = torch.randn(4, 12, 12, dtype=torch.float64).softmax(-1)
    found = pseudo_inverse(matrix, iterations=40)
    torch.testing.assert_close(found, torch.linalg.pinv(matrix), rtol=1e-6, atol=1e-6)


def test_as_many_landmarks_as_tokens_give_softmax_attention():
    query, key, value = torch.randn(3, 1, 2, 10, 16, dtype=torch.float64)
    found = nystrom_attention(query, key, value, landmarks=10, iterations=60)
    torch.testing.assert_close(
        found, reference.softmax_attention(query, key, value), rtol=1e-6, atol=1e-6
    )


def test_the_last_segment_may_be_short():
    tokens = torch.arange(10.0).reshape(1, 1, 10, 1)
    assert segment_means(tokens, 4).flatten().tolist() == [1.0, 4.0, 7.0, 9.0]
    assert segment_means(tokens, 64).flatten().tolist() == list(range(10))


def test_a_sample_does_not_depend_on_its_batch_mates():
    query, key, value = torch.randn(3, 4, 2, 32, 8)
    whole = nystrom_attention(query, key, value, landmarks=8)
    alone = nystrom_attention(query[2:3], key[2:3], value[2:3], landmarks=8)
    torch.testing.assert_close(whole[2:3], alone)


def test_module_adds_a_convolution_of_every_head_over_the_tokens():
    module = NystromAttention(2, landmarks=4, kernel=3).double()
    query, key, value = torch.randn(3, 1, 2, 16, 8, dtype=torch.float64)
    weight = module.convolution.weight.detach().reshape(2, 3)
    padded = F.pad(value, (0, 0, 1, 1))
    added = sum(weight[:, i].view(1, 2, 1, 1) * padded[:, :, i : i + 16] for i in range(3))
    plain = nystrom_attention(query, key, value, landmarks=4)
    torch.testing.assert_close(module(query, key, value).detach(), plain + added)
    assert sum(p.numel() for p in NystromAttention(12).parameters()) == 12 * 33


def test_gradients():
    inputs = [side.requires_grad_() for side in torch.randn(3, 1, 1, 7, 3, dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda *qkv: nystrom_attention(*qkv, landmarks=3), inputs)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_finite_and_near(dtype):
    query, key, value = torch.randn(3, 1, 2, 64, 16, dtype=torch.float64)
    found = nystrom_attention(*(side.to(dtype) for side in (query, key, value)), landmarks=8)
    expected = nystrom_attention(query, key, value, landmarks=8)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0.1, atol=0.1)
