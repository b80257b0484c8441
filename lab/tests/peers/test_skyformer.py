"""Skyformer against its formula, with loops, in float64."""

import pytest
import torch

from lln.errors import InvalidInputError
from lln_lab import peers
from lln_lab.peers.skyformer import BITS, Skyformer


def core(heads=2, width=8, **options):
    host = peers.Host(embed_dim=heads * width, num_heads=heads, max_len=64)
    return Skyformer(host, **options).eval()


def kernel(left, right):
    """exp(−‖a−b‖²/(2√d)) of unscaled rows."""
    distances = torch.stack([(row - right).square().sum(-1) for row in left])
    return torch.exp(-distances / (2 * left.shape[-1] ** 0.5))


def dense(query, key, value, uniforms, steps=6, ridge=0.1):
    """One head, real tokens only, straight from the equation."""
    tokens = len(query)
    rows = [
        side[int(number / 2**BITS * tokens)]
        for side, numbers in zip((query, key), uniforms.tolist(), strict=True)
        for number in numbers
    ]
    landmarks = torch.stack(rows)
    between = kernel(landmarks, landmarks) + ridge * torch.eye(len(rows), dtype=torch.float64)
    root = torch.diag(between.sum(1) ** -0.5)
    balanced = root @ between @ root
    inverse = balanced.T / balanced.sum(0).max()
    eye = torch.eye(len(rows), dtype=torch.float64)
    for _ in range(steps):
        az = balanced @ inverse
        inverse = inverse @ (13 * eye - 15 * az + 7 * az @ az - az @ az @ az) / 4
    middle = root @ inverse @ root
    return kernel(query, landmarks) @ middle @ kernel(landmarks, key) @ value


@pytest.mark.parametrize("steps", [1, 6])
def test_agrees_with_the_dense_formula_whatever_is_masked(steps):
    query, key, value = torch.randn(3, 3, 2, 24, 8, dtype=torch.float64)
    order = torch.rand(3, 24, generator=torch.Generator().manual_seed(1)).argsort(-1)
    mask = order < torch.tensor([[17], [24], [2]])
    module = core(landmarks=6, iterations=steps)
    for found, used in (
        (module(query, key, value), torch.ones_like(mask)),
        (module(query, key, value, mask), mask),
    ):
        for sample in range(3):
            real = used[sample]
            for head in range(2):
                one = (side[sample, head, real] for side in (query, key, value))
                expected = dense(*one, module.uniforms, steps)
                torch.testing.assert_close(found[sample, head, real], expected)


def test_all_rows_as_landmarks_give_the_kernel_itself():
    tokens = 10
    module = core(landmarks=2 * tokens, ridge=0.0, iterations=40)
    module.uniforms.copy_(torch.arange(tokens) * (2**BITS // tokens) + 2 ** (BITS - 8))
    query, key, value = 1.5 * torch.randn(3, 1, 2, tokens, 8, dtype=torch.float64)
    found = module(query, key, value)
    for head in range(2):
        expected = kernel(query[0, head], key[0, head]) @ value[0, head]
        torch.testing.assert_close(found[0, head], expected, rtol=1e-6, atol=1e-8)


def test_landmarks_are_drawn_in_training_and_kept_in_evaluation():
    query, key, value = torch.randn(3, 1, 2, 24, 8, dtype=torch.float64)
    module = core(landmarks=6)
    start = module.uniforms.clone()
    assert torch.equal(module(query, key, value), module(query, key, value))
    assert torch.equal(module.uniforms, start)
    module.train()
    first = module(query, key, value)
    assert not torch.equal(first, module(query, key, value))
    drawn = module.uniforms.clone()
    module.eval()(query, key, value)
    assert torch.equal(module.uniforms, drawn)
    assert torch.equal(module.bfloat16().uniforms, drawn)


def test_original_draws_in_evaluation_and_couples_the_batch():
    query, key, value = torch.randn(3, 3, 2, 24, 8, dtype=torch.float64)
    module = core(landmarks=6, iterations=2, compat="original")
    torch.manual_seed(0)
    whole = module(query, key, value)
    assert not torch.equal(whole, module(query, key, value))
    torch.manual_seed(0)
    alone = module(query[:1], key[:1], value[:1])
    assert (whole[:1] - alone).abs().max() > 1e-9
    same = core(landmarks=6, iterations=2)
    torch.manual_seed(0)
    same.uniforms.random_(2**BITS)
    one = same(query[:1, :1], key[:1, :1], value[:1, :1])
    torch.manual_seed(0)
    torch.testing.assert_close(module(query[:1, :1], key[:1, :1], value[:1, :1]), one)


def test_gradients():
    inputs = [side.requires_grad_() for side in torch.randn(3, 1, 1, 5, 3, dtype=torch.float64)]
    assert torch.autograd.gradcheck(core(heads=1, width=3, landmarks=4), inputs)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"landmarks": 5}, "even"),
        ({"landmarks": 0}, "landmarks"),
        ({"iterations": 0}, "iterations"),
        ({"ridge": -1.0}, "ridge"),
        ({"compat": "other"}, "'original'"),
    ],
)
def test_bad_options_get_a_sentence(options, said):
    with pytest.raises(InvalidInputError, match=said):
        core(**options)
