"""Synthesizer against its four equations, row by row."""

import pytest
import torch
from lab.tests.peers.contract import HEADS, MAX_LEN, WIDTH, build, some_padding, tokens

from lln.errors import InvalidInputError
from lln_lab import peers

VARIANTS = ("dense", "random", "factorised_dense", "factorised_random")


def two_layers(part, x, head):
    """W₂ relu(W₁ x + b₁) + b₂ of one token and head."""
    width = WIDTH // HEADS
    hidden = (part.hidden.weight @ x + part.hidden.bias).clamp_min(0)
    return part.weight[head].T @ hidden[head * width : (head + 1) * width] + part.bias[head, 0]


def row(layer, x, i, head):
    """B_i of one head, all max_len columns."""
    if layer.variant == "dense":
        return two_layers(layer.synthesis, x[i], head)
    if layer.variant == "random":
        return layer.table[head, i]
    if layer.variant == "factorised_random":
        return torch.stack([layer.left[head, i] @ layer.right[head, j] for j in range(MAX_LEN)])
    coarse, fine = two_layers(layer.coarse, x[i], head), two_layers(layer.fine, x[i], head)
    side = len(fine)
    return torch.stack([coarse[j // side] * fine[j % side] for j in range(MAX_LEN)])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_agrees_with_its_equation(variant, is_causal):
    layer = build("synthesizer", variant=variant, is_causal=is_causal)
    x, mask = tokens(length=21), some_padding(21)
    found = layer(x, mask)
    width = WIDTH // HEADS
    for sample in range(2):
        values = x[sample] @ layer.value.weight.T + layer.value.bias
        for i in range(21):
            if not mask[sample, i]:
                continue
            keys = [j for j in range(21) if mask[sample, j] and (j <= i or not is_causal)]
            parts = []
            for head in range(HEADS):
                weights = row(layer, x[sample], i, head)[keys].softmax(0)
                parts.append(weights @ values[keys, head * width : (head + 1) * width])
            expected = layer.out.weight @ torch.cat(parts) + layer.out.bias
            torch.testing.assert_close(found[sample, i], expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_keeps_the_contract(variant):
    layer, x = build("synthesizer", variant=variant), tokens()
    mask = some_padding()
    longer = torch.cat((x, tokens(length=9, seed=7)), 1)
    padded = torch.nn.functional.pad(mask, (0, 9))
    torch.testing.assert_close(layer(longer, padded)[:, :40], layer(x, mask))
    low = build("synthesizer", variant=variant, dtype=torch.bfloat16)
    assert low(x.bfloat16(), mask).isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = build("synthesizer", variant=variant, dtype=torch.float32)(x.float(), mask)
    assert mixed.isfinite().all()


def test_parameters_are_those_of_the_card():
    width, length, shared = WIDTH // HEADS, MAX_LEN, 2 * (WIDTH * WIDTH + WIDTH)
    hidden = WIDTH * WIDTH + WIDTH
    expected = {
        "dense": hidden + HEADS * (width + 1) * length,
        "random": HEADS * length * length,
        "factorised_random": 2 * HEADS * length * 8,
        "factorised_dense": 2 * (hidden + HEADS * (width + 1) * 10),
    }
    for variant, own in expected.items():
        assert peers.parameter_count(build("synthesizer", variant=variant)) == shared + own


@pytest.mark.parametrize("variant", ["random", "factorised_random"])
def test_fixed_matrices_are_saved_but_not_trained(variant):
    layer = build("synthesizer", variant=variant, learned=False)
    trained = {name for name, _ in layer.named_parameters()}
    assert trained == {"value.weight", "value.bias", "out.weight", "out.bias"}
    assert set(layer.state_dict()) > trained


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"variant": "sparse"}, "'factorised_random'"),
        ({"rank": 0}, "rank"),
        ({"learned": False}, "dense has none"),
    ],
)
def test_bad_options(options, said):
    with pytest.raises(InvalidInputError, match=said):
        build("synthesizer", **options)
