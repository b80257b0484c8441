"""PolaFormer against its formula, dense and in float64."""

import pytest
import torch
from lab.tests.peers.contract import HEADS, WIDTH, build, tokens

from lln.errors import InvalidInputError

D = WIDTH // HEADS


def trained(**options):
    """A layer whose powers and scales are no longer all alike."""
    layer = build("polaformer", **options)
    with torch.no_grad():
        for parameter in (layer.power, layer.scale):
            parameter.add_(torch.randn_like(parameter))
    return layer


def per_head(x):
    return x.unflatten(-1, (HEADS, D)).transpose(1, 2)


def dense(layer, x):
    """The kernel part of one sample ``[N, embed_dim]``, before the output projection."""
    query, key, value = (per_head(p(x[None]))[0] for p in (layer.query, layer.key, layer.value))
    outs = []
    for head in range(HEADS):
        scale = (1 + layer.scale[head, 0].exp()).log()
        power = 1 + layer.alpha / (1 + (-layer.power[head, 0]).exp())
        q, k = query[head] / scale, key[head] / scale
        up_q, down_q = q.clamp(min=0) ** power, (-q).clamp(min=0) ** power
        up_k, down_k = k.clamp(min=0) ** power, (-k).clamp(min=0) ** power
        same = up_q @ up_k.T + down_q @ down_k.T
        other = down_q @ up_k.T + up_q @ down_k.T
        halves = value[head].chunk(2, dim=-1)
        outs += [
            w @ half / (w.sum(-1, keepdim=True) + 1e-6 * len(x))
            for w, half in zip((same, other), halves, strict=True)
        ]
    return torch.cat(outs, dim=-1)


def some_padding():
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[1, 31:] = False
    return mask


def test_agrees_with_the_formula():
    layer, x, mask = trained(), tokens(), some_padding()
    found = layer(x, mask)
    for sample, real in ((0, 40), (1, 31)):
        expected = layer.out(dense(layer, x[sample, :real]))
        torch.testing.assert_close(found[sample, :real], expected)


def test_the_two_matrices_are_those_of_the_output():
    layer, x, mask = trained(), tokens(), some_padding()
    matrices = layer.matrix(x, mask)
    assert matrices.shape == (2, HEADS, 2, 40, 40)
    assert (matrices >= 0).all()
    assert (matrices[1, ..., 31:] == 0).all()
    # Short of 1 by the offset over the mean weight.
    sums = matrices.sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-5)
    halves = torch.stack(per_head(layer.value(x)).chunk(2, dim=-1), dim=2)
    joined = torch.cat((matrices @ halves).unbind(2), dim=-1).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x, mask)[mask], layer.out(joined)[mask])


def test_gate_and_own_convolution_are_what_they_say():
    layer = trained(gate=True, local=5)
    x = tokens()[:1]
    value = torch.nn.functional.pad(per_head(layer.value(x))[0], (0, 0, 2, 2))
    filters, bias = layer.local.weight[:, 0], layer.local.bias
    local = sum(filters[:, i] * value[:, i : i + 40] for i in range(5)) + bias
    inner = dense(layer, x[0]) + local.transpose(0, 1).flatten(1)
    expected = layer.out(inner * layer.gate(x[0]))
    torch.testing.assert_close(layer(x)[0], expected)


def test_the_own_convolution_does_not_see_padding():
    layer, x, mask = trained(local=5), tokens(), some_padding()
    alone = layer(x[1:, :31])
    torch.testing.assert_close(layer(x, mask)[1:, :31], alone)


def test_the_diagonal_branch_is_an_average():
    layer, x = trained(diagonal=40), tokens()
    softmax = build("softmax")
    softmax.load_state_dict(layer.state_dict(), strict=False)
    plain = trained()
    plain.load_state_dict(layer.state_dict())
    expected = 0.5 * (plain(x) + softmax(x))
    torch.testing.assert_close(layer(x), expected)


def test_equal_powers_are_blind_to_the_length_of_q_and_different_ones_are_not():
    x = tokens()
    for layer, blind in ((build("polaformer"), True), (trained(), False)):
        before = layer.matrix(x)
        with torch.no_grad():
            layer.query.weight.mul_(3)
            layer.query.bias.mul_(3)
        # The offset of the denominator is not scaled along.
        assert torch.allclose(layer.matrix(x), before, rtol=1e-4, atol=1e-6) == blind


def test_options_that_do_not_fit_are_refused():
    for options, said in (
        ({"alpha": 0.0}, "alpha"),
        ({"local": 4}, "odd"),
        ({"convolution": 4}, "odd"),
        ({"diagonal": -1}, "block_size"),
        ({"embed_dim": 6, "num_heads": 2}, "even"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            build("polaformer", **options)
