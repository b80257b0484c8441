"""Reformer against transformers' buckets and against lists written out in loops."""

import math
from collections import Counter

import pytest
import torch
from lab.tests.peers.contract import build, tokens
from lab.tests.peers.growth import growth

from lln.errors import InvalidInputError
from lln_lab.peers.reformer import attend_sorted, bucket_factors


def looped(shared, value, buckets, chunk, is_causal=False):
    """One head of one sequence without padding: ``[N, D]`` twice, buckets ``[R, N]``.

    Every entry of the joined list gets a count of the keys it meets; a key met twice has
    log 2 added to its score.
    """
    rounds, length = buckets.shape
    entries = [
        (r, i)
        for r in range(rounds)
        for i in sorted(range(length), key=lambda i: (int(buckets[r, i]), i))
    ]
    parts = [entries[at : at + chunk] for at in range(0, len(entries), chunk)]
    mass = torch.full((length, rounds), -math.inf, dtype=shared.dtype)
    rows = torch.zeros(length, rounds, shared.shape[1], dtype=shared.dtype)
    scores = shared @ unit(shared).T
    for at, part in enumerate(parts):
        met = Counter(j for _, j in parts[at - 1] + part)
        for r, i in part:
            keys = [j for j in met if not (is_causal and j > i)]
            logits = torch.stack(
                [(scores[i, j] if j != i else scores.new_tensor(-1e5)) for j in keys]
            )
            logits = logits + torch.tensor([math.log(met[j]) for j in keys])
            mass[i, r] = logits.logsumexp(0)
            rows[i, r] = logits.softmax(0) @ value[keys]
    return (mass.softmax(1).unsqueeze(-1) * rows).sum(1)


def unit(shared):
    return shared / (shared.square().sum(1, keepdim=True) + 1e-6 * shared.shape[1]).sqrt()


def plain(shared, value, is_causal=False):
    """Shared-QK softmax attention, the own key last resort."""
    scores = shared @ unit(shared).T
    scores.fill_diagonal_(-1e5)
    if is_causal:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores.softmax(-1) @ value


def hashed(layer, shared, head):
    """Buckets ``[R, N]`` of a sequence without padding, from the concatenation [uR; −uR]."""
    count = 2 ** int(math.log2(2 * (len(shared) // layer.chunk)))
    factors = [count]
    if count > 2 * max(int((layer.host.max_len // layer.chunk) ** 0.5), layer.chunk):
        power = count.bit_length() - 1
        factors = [2 ** (power // 2), 2 ** (power - power // 2)]
    found, below, start = 0, 1, 0
    for factor, columns in zip(factors, layer.columns, strict=False):
        matrix = layer.rotations[head, :, :, start : start + factor // 2]
        turned = shared @ matrix
        found = found + below * torch.cat((turned, -turned), -1).argmax(-1)
        below, start = below * factor, start + columns
    return found


def dense(layer, x, is_causal=False):
    """One sequence without padding, ``[N, width]``."""
    shared, value = layer.query_key(x), layer.value(x)
    out = []
    for head, (u, v) in enumerate(zip(shared.chunk(2, -1), value.chunk(2, -1), strict=True)):
        if len(x) <= layer.chunk:
            out.append(plain(u, v, is_causal))
        else:
            out.append(looped(u, v, hashed(layer, u, head), layer.chunk, is_causal))
    return layer.out(torch.cat(out, -1))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("rounds", "chunk"), [(1, 8), (2, 8), (3, 4), (2, 2)])
def test_agrees_with_lists_in_loops_whatever_the_padding(rounds, chunk, is_causal):
    layer = build("reformer", rounds=rounds, chunk=chunk, is_causal=is_causal)
    mask = torch.zeros(5, 40, dtype=torch.bool)
    mask[0] = True
    # Buckets of exactly a power of two.
    mask[1, :32] = True
    # Padding on the left, and samples that fit one chunk.
    mask[2, 13:] = True
    mask[3, 5 : 5 + max(2, chunk - 1)] = True
    mask[4, 7] = True
    x = tokens(batch=5, length=40)
    with torch.no_grad():
        found = layer(x, mask)
        for sample, kept in enumerate(mask):
            expected = dense(layer, x[sample][kept], is_causal)
            torch.testing.assert_close(found[sample][kept], expected, rtol=1e-8, atol=1e-9)


def test_a_token_that_sees_only_itself_is_exact_in_float32():
    # So many rounds that some window holds the first token twice.
    layer = build("reformer", rounds=16, is_causal=True, dtype=torch.float32)
    x = tokens(length=20, dtype=torch.float32)
    torch.testing.assert_close(layer(x)[:, 0], layer.out(layer.value(x[:, 0])))


def test_many_buckets_are_hashed_by_two_factors():
    assert bucket_factors(64, 64) == [(2, 1)]
    assert bucket_factors(10, 64) == [(2, 1)]
    assert bucket_factors(8192, 64)[-2:] == [(128, 1), (16, 16)]
    layer = build("reformer", chunk=2)
    assert layer.factors == [(2, 1), (4, 1), (8, 1), (4, 4), (4, 8), (8, 8)]
    x = tokens(batch=1, length=96)
    with torch.no_grad():
        torch.testing.assert_close(layer(x)[0], dense(layer, x[0]), rtol=1e-8, atol=1e-9)
        shared = layer.query_key(x).unflatten(-1, (2, -1)).transpose(1, 2)
        assert len(layer.buckets(shared, torch.tensor([96])).unique()) > 60


@pytest.mark.parametrize("with_pads", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_agrees_with_transformers_given_its_buckets(rounds, is_causal, with_pads):
    modeling = pytest.importorskip("transformers.models.reformer.modeling_reformer")
    config = modeling.ReformerConfig(
        hidden_size=32,
        num_attention_heads=2,
        attention_head_size=16,
        lsh_attn_chunk_length=8,
        num_hashes=rounds,
        num_buckets=8,
        hash_seed=1,
        is_decoder=is_causal,
        lsh_attention_probs_dropout_prob=0.0,
        max_position_embeddings=64,
        axial_pos_embds=False,
    )
    # In float64: theirs subtracts numbers of 10⁵ where a token sees only itself.
    theirs = modeling.LSHSelfAttention(config, layer_idx=0).double().eval()
    ours = build("reformer", chunk=8)
    theirs.query_key.load_state_dict(ours.query_key.state_dict())
    theirs.value.load_state_dict(ours.value.state_dict())
    x, mask = tokens(length=40), torch.ones(2, 40, dtype=torch.bool)
    if with_pads:
        mask[1, 27:] = False
    with torch.no_grad():
        answer = theirs(x, attention_mask=mask)
        shared, value = (
            side(x).unflatten(-1, (2, -1)).transpose(1, 2) for side in (ours.query_key, ours.value)
        )
        found = attend_sorted(
            shared,
            value,
            answer.buckets,
            mask.unsqueeze(1).expand(-1, rounds, -1),
            torch.full((2,), rounds * 40 // 8 - 1),
            chunk=8,
            is_causal=is_causal,
        )
    found = found.transpose(1, 2).flatten(2)
    torch.testing.assert_close(found[mask], answer.hidden_states[mask], rtol=1e-5, atol=1e-5)


def test_a_window_over_all_is_shared_attention():
    layer, x = build("reformer", rounds=1, chunk=20), tokens(batch=1, length=40)
    with torch.no_grad():
        shared, value = layer.query_key(x[0]), layer.value(x[0])
        heads = zip(shared.chunk(2, -1), value.chunk(2, -1), strict=True)
        expected = layer.out(torch.cat([plain(u, v) for u, v in heads], -1))
        torch.testing.assert_close(layer(x)[0], expected, rtol=1e-9, atol=1e-10)


def test_many_rounds_tend_to_shared_attention():
    x = 4 * tokens(batch=1, length=64)
    distances = []
    for rounds in (1, 4, 16, 64):
        layer = build("reformer", rounds=rounds, chunk=8)
        with torch.no_grad():
            shared, value = layer.query_key(x[0]), layer.value(x[0])
            heads = zip(shared.chunk(2, -1), value.chunk(2, -1), strict=True)
            full = layer.out(torch.cat([plain(u, v) for u, v in heads], -1))
            distances.append(float((layer(x)[0] - full).norm() / full.norm()))
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.2 * distances[0]


def test_training_draws_and_evaluation_does_not():
    layer, x = build("reformer"), tokens()
    drawn = layer.rotations.clone()
    layer(x)
    assert torch.equal(layer.rotations, drawn)
    layer.train()(x)
    assert not torch.equal(layer.rotations, drawn)
    assert "rotations" in layer.state_dict()


def test_hashing_takes_the_direction_alone():
    layer = build("reformer")
    shared = torch.randn(1, 2, 40, 16, dtype=torch.float64)
    lengths = torch.tensor([40])
    assert torch.equal(layer.buckets(shared, lengths), layer.buckets(3 * shared, lengths))


def test_never_forms_a_matrix():
    # Buckets are hashed by the root of their number at most, and lists are cut to chunks.
    assert growth(build("reformer", max_len=2048, dtype=torch.float32)) < 4.5


def test_bad_options_get_a_sentence():
    for options, said in (({"rounds": 0}, "rounds"), ({"chunk": 0}, "chunk")):
        with pytest.raises(InvalidInputError, match=said):
            build("reformer", **options)
