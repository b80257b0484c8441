"""LION: the chunked form against masks written as products of decays."""

import pytest
import torch
from lab.tests.peers.contract import HEADS, MAX_LEN, WIDTH, build, tokens

from lln.errors import InvalidInputError
from lln_lab import peers
from lln_lab.peers.lion import CHUNK, fading_sums, running_sums

D = WIDTH // HEADS


def mask_of(decays):
    """M of one head from its decays ``[N]``, row by row."""
    length = len(decays)
    mask = torch.eye(length, dtype=decays.dtype)
    for i in range(length):
        mask[i, :i] = decays[:i].flip(0).cumprod(0).flip(0)
        mask[i, i + 1 :] = decays[i + 1 :].cumprod(0)
    return mask


def positive(x):
    y = x * x.sigmoid() + 0.5
    return y / y.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, CHUNK, CHUNK + 1, 150])
def test_the_chunked_sums_are_the_masked_ones(length, causal):
    features_q, features_k = torch.rand(2, 1, 2, length, 5, dtype=torch.float64)
    values = torch.randn(1, 2, length, 3, dtype=torch.float64)
    decays = 0.5 + torch.rand(1, 2, length, dtype=torch.float64) / 2
    found = fading_sums(features_q, features_k, values, decays.log(), causal)
    for head in range(2):
        weights = features_q[0, head] @ features_k[0, head].T * mask_of(decays[0, head])
        if causal:
            weights = weights.tril()
        torch.testing.assert_close(found[0, head], weights @ values[0, head])


@pytest.mark.parametrize("count", [1, 2, 3, 8, 13])
def test_running_sums_are_the_recurrence(count):
    states = torch.randn(1, 2, count, 3, 2, dtype=torch.float64)
    log_decay = -torch.rand(1, 2, count, 1, dtype=torch.float64)
    found, last = running_sums(states, log_decay), torch.zeros(1, 2, 3, 2, dtype=torch.float64)
    for g in range(count):
        last = log_decay[:, :, g, :, None].exp() * last + states[:, :, g]
        torch.testing.assert_close(found[:, :, g], last, rtol=1e-12, atol=1e-12)


def test_running_sums_keep_memory_that_is_linear():
    def kept(count):
        """Numbers that the backward pass of so many chunks holds on to."""
        numbers = []
        states = torch.randn(1, 1, count, 4, 4, requires_grad=True)
        log_decay = (-torch.rand(1, 1, count, 1)).requires_grad_()

        def keep(tensor):
            numbers.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            running_sums(states, log_decay)
        return sum(numbers)

    # Doubling the reach would have 6 steps and then 9, each over all chunks: 12 times as much.
    assert 7 < kept(512) / kept(64) < 8.5


@pytest.mark.parametrize("causal", [False, True])
def test_lion_d_fades_by_the_distance(causal):
    core = build("lion_d", is_causal=causal).core
    query, key, value = torch.randn(3, 1, HEADS, 70, D, dtype=torch.float64)
    found = core(query, key, value).detach()
    i, j = torch.meshgrid(torch.arange(70), torch.arange(70), indexing="ij")
    for head in range(HEADS):
        fading = core.decay[head].sigmoid().detach() ** (i - j).abs()
        weights = positive(query[0, head]) @ positive(key[0, head]).T * fading
        if causal:
            weights = weights.tril()
        expected = weights / weights.sum(-1, keepdim=True) @ value[0, head]
        torch.testing.assert_close(found[0, head], expected)


def test_lion_d_that_does_not_fade_is_the_linear_transformer():
    lion, elu, x = build("lion_d", features="elu"), build("elu"), tokens(length=MAX_LEN)
    elu.load_state_dict(lion.state_dict(), strict=False)
    assert (lion(x) - elu(x)).abs().max() > 1e-3
    torch.nn.init.constant_(lion.core.decay, 100.0)
    torch.testing.assert_close(lion(x), elu(x))


def lion_s_dense(layer, x, causal):
    """One sample ``[N, embed_dim]`` by the equation."""
    query, key, value = (
        project(x).unflatten(-1, (HEADS, D)).transpose(0, 1)
        for project in (layer.query, layer.key, layer.value)
    )
    decays = 1 - layer.decay(x).sigmoid()
    outs = []
    for head in range(HEADS):
        weights = positive(query[head]) @ positive(key[head]).T * mask_of(decays[:, head].detach())
        weights = weights.tril() if causal else weights
        outs.append(weights / weights.sum(-1, keepdim=True) @ value[head])
    return layer.out(torch.cat(outs, dim=-1))


@pytest.mark.parametrize("causal", [False, True])
def test_lion_s_agrees_with_the_formula(causal):
    layer, x = build("lion_s", is_causal=causal), tokens(length=70)
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[1, 66:] = False
    found = layer(x, mask)
    torch.testing.assert_close(found[0], lion_s_dense(layer, x[0], causal))
    torch.testing.assert_close(found[1, :66], lion_s_dense(layer, x[1, :66], causal))
    value = layer.value(x).unflatten(-1, (HEADS, D)).transpose(1, 2)
    dense = layer.out((layer.matrix(x, mask) @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(found[mask], dense[mask])


def test_two_recurrences_count_the_own_token_half_each():
    features_q, features_k = torch.rand(2, 1, 1, 70, 5, dtype=torch.float64)
    values = torch.randn(1, 1, 70, 3, dtype=torch.float64)
    decays = 0.5 + torch.rand(70, dtype=torch.float64) / 2
    q, k, v = features_q[0, 0], features_k[0, 0], values[0, 0]

    def half_of(q, k, v, decays):
        """One direction: a token's own decay is the state's before the next token comes in."""
        state, out = torch.zeros(5, 3, dtype=torch.float64), []
        for i in range(70):
            state = (decays[i - 1] if i else 1.0) * state + torch.outer(k[i], v[i])
            out.append(q[i] @ state - (q[i] @ k[i]) * v[i] / 2)
        return torch.stack(out)

    back = half_of(q.flip(0), k.flip(0), v.flip(0), decays.flip(0)).flip(0)
    found = fading_sums(features_q, features_k, values, decays.log()[None, None], False)
    torch.testing.assert_close(found[0, 0], half_of(q, k, v, decays) + back)


def test_the_mask_is_symmetric_only_where_all_decays_are_equal():
    layer, x = build("lion_s"), tokens(length=20)[:1]
    ours = mask_of((1 - layer.decay(x).sigmoid()).detach()[0, :, 0])
    assert (ours - ours.T).abs().max() > 0.01
    decays = (1 - layer.decay(x).sigmoid()).detach()[0, :, 0]
    ratio = (decays[None, :] / decays[:, None]).tril(-1)
    torch.testing.assert_close((ours / ours.T).tril(-1), ratio)
    equal = mask_of(torch.full((20,), 0.7, dtype=torch.float64))
    torch.testing.assert_close(equal, equal.T)


@pytest.mark.parametrize("name", ["lion_d", "lion_s"])
def test_padding_in_the_middle_is_as_if_it_were_not_there(name):
    layer, x = build(name), tokens(length=80)
    mask = torch.ones(2, 80, dtype=torch.bool)
    mask[:, 20:30] = False
    together = layer(x, mask)[:, mask[0]]
    torch.testing.assert_close(together, layer(x[:, mask[0]]))


@pytest.mark.parametrize("name", ["lion_d", "lion_s"])
def test_turning_the_sequence_round_turns_the_output_round(name):
    layer, x = build(name), tokens(length=70)
    torch.testing.assert_close(layer(x.flip(1)), layer(x).flip(1))


def test_a_closed_gate_keeps_every_token_to_itself():
    layer, x = build("lion_s"), tokens(length=70)
    with torch.no_grad():
        layer.decay.bias.fill_(200.0)
    own = layer.out(layer.value(x))
    torch.testing.assert_close(layer(x), own)


def test_the_decays_are_the_added_parameters():
    plain = peers.parameter_count(build("elu"))
    assert peers.parameter_count(build("lion_d")) - plain == HEADS
    assert peers.parameter_count(build("lion_s")) - plain == HEADS * (WIDTH + 1)


@pytest.mark.parametrize("name", ["lion_d", "lion_s"])
def test_options_that_do_not_fit_are_refused(name):
    with pytest.raises(InvalidInputError, match="features"):
        build(name, features="exp")


def test_gradients():
    sides = torch.rand(2, 1, 1, 5, 2, dtype=torch.float64)
    values = torch.randn(1, 1, 5, 2, dtype=torch.float64)
    decays = -torch.rand(1, 1, 5, dtype=torch.float64)
    inputs = [side.requires_grad_() for side in (*sides, values, decays)]
    assert torch.autograd.gradcheck(lambda *given: fading_sums(*given, False), inputs)
    assert torch.autograd.gradcheck(lambda *given: fading_sums(*given, True), inputs)
