"""BigBird against transformers and against block lists written out in loops."""

import pytest
import torch
from lab.tests.peers.contract import build, tokens
from lab.tests.peers.growth import growth

from lln.errors import InvalidInputError
from lln_lab.peers import Host
from lln_lab.peers.bigbird import BigBird, attend_blocks


def looped(query, key, value, mask, last, random, block):
    """One head of one sample, ``[N, D]``: a list of keys for every query.

    Args: random[i] lists the random blocks of block i.
    """
    out = torch.zeros_like(query)
    for i in range(len(query)):
        own = i // block
        blocks = {0, last, own - 1, own, own + 1, *random[own]}
        if own in (0, last):
            blocks = set(range(last + 1))
        keys = [j for j in range(len(query)) if j // block in blocks and mask[j]]
        weights = (key[keys] @ query[i] / query.shape[-1] ** 0.5).softmax(0)
        out[i] = weights @ value[keys]
    return out


def plans(core, lengths, blocks):
    last = (torch.tensor(lengths) - 1) // core.block
    chosen, valid = core.plan(last, blocks)
    return last, [
        [
            [
                [int(one) for one, is_one in zip(row, kept, strict=True) if is_one]
                for row, kept in zip(*head, strict=True)
            ]
            for head in zip(*sample, strict=True)
        ]
        for sample in zip(chosen, valid, strict=True)
    ]


@pytest.mark.parametrize("length", [1, 4, 13, 30, 41])
def test_agrees_with_lists_in_loops(length):
    core = build("bigbird", block=3).core
    query, key, value = torch.randn(3, 2, 2, length, 16, dtype=torch.float64)
    lengths = [length, max(1, length - 7)]
    mask = torch.arange(length) < torch.tensor(lengths).unsqueeze(-1)
    mask[1, 0] = lengths[1] == 1
    last, random = plans(core, lengths, -(-length // 3))
    found = core(query, key, value, mask)
    for b in range(2):
        for h in range(2):
            sides = (side[b, h] for side in (query, key, value))
            expected = looped(*sides, mask[b], int(last[b]), random[b][h], 3)
            kept = mask[b]
            torch.testing.assert_close(found[b, h][kept], expected[kept])


@pytest.mark.parametrize("random_blocks", [0, 1, 3, 5])
def test_random_blocks_are_new_and_different(random_blocks):
    core = build("bigbird", block=4, random_blocks=random_blocks).core
    lengths = [4 * count for count in (1, 5, 6, 9, 20, 24)]
    last, random = plans(core, lengths, 24)
    for end, sample in zip(last.tolist(), random, strict=True):
        for head in sample:
            for own in range(1, end):
                others = set(range(1, end)) - {own - 1, own, own + 1}
                assert set(head[own]) <= others
                assert len(set(head[own])) == len(head[own]) == min(random_blocks, len(others))


def test_random_blocks_are_drawn_evenly():
    torch.manual_seed(0)
    core = BigBird(Host(embed_dim=4000, num_heads=4000, max_len=21), block=1)
    chosen, _ = core.plan(torch.tensor([20]), 21)
    counts = torch.bincount(chosen[0, :, 10].flatten(), minlength=21)
    expected = [0.0 if i in (0, 9, 10, 11, 20) else 1 / 16 for i in range(21)]
    torch.testing.assert_close(counts / 12_000, torch.tensor(expected), rtol=0, atol=0.01)


def test_few_blocks_are_full_attention():
    core = build("bigbird", block=5, random_blocks=3).core
    query, key, value = torch.randn(3, 1, 2, 35, 16, dtype=torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(core(query, key, value), expected)


def test_the_plan_is_drawn_once_and_saved():
    layer = build("bigbird", seed=0)
    before = layer.core.draws.clone()
    layer.train()(tokens())
    assert torch.equal(layer.core.draws, before)
    assert torch.equal(layer.state_dict()["core.draws"], before)
    assert torch.equal(layer.to(torch.bfloat16).core.draws, before)


def test_a_seed_fixes_the_plan_of_each_layer():
    def draws(seed, layer=0):
        host = Host(embed_dim=32, num_heads=2, max_len=512, layer=layer, layers=2)
        return BigBird(host, seed=seed).draws

    assert torch.equal(draws(5), draws(5))
    assert not torch.equal(draws(5), draws(5, layer=1))
    assert not torch.equal(draws(None), draws(None))


@pytest.mark.parametrize("padded", [0, 3, 9])
def test_agrees_with_transformers_given_its_random_blocks(padded):
    numpy = pytest.importorskip("numpy")
    modeling = pytest.importorskip("transformers.models.big_bird.modeling_big_bird")
    block, length, count = 4, 48, 2
    config = modeling.BigBirdConfig(
        hidden_size=32,
        num_attention_heads=2,
        block_size=block,
        num_random_blocks=count,
        max_position_embeddings=64,
        attention_probs_dropout_prob=0.0,
    )
    # Training mode, because in evaluation theirs takes block 0 for every random one.
    theirs = modeling.BigBirdBlockSparseAttention(config, seed=7).train()
    ours = build("bigbird", dtype=torch.float32)
    for name in ("query", "key", "value"):
        getattr(theirs, name).load_state_dict(getattr(ours, name).state_dict())
    x = tokens(length=length, dtype=torch.float32)
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, length - padded :] = False
    blocked, band, rows, columns = modeling.BigBirdModel.create_masks_for_block_sparse_attn(
        mask.float(), block
    )
    state = numpy.random.get_state()
    expected, _ = theirs(x, band, rows, columns, blocked, blocked)
    numpy.random.seed(7)
    lengths, counts = theirs._get_rand_attn_plan(length, block, count)
    drawn = theirs._bigbird_block_rand_mask_with_head(
        length, length, block, block, 2, lengths, counts
    )
    numpy.random.set_state(state)
    blocks = length // block
    chosen = torch.zeros(2, 2, blocks, count, dtype=torch.long)
    chosen[:, :, 1:-1] = torch.tensor(numpy.stack(drawn))
    query, key, value = ours.heads(x)
    # Theirs has the last block of the padded length at its end.
    last = torch.full((2,), blocks - 1)
    found = attend_blocks(
        query,
        key,
        value,
        mask,
        last,
        chosen,
        torch.ones_like(chosen, dtype=torch.bool),
        block=block,
    )
    found = found.transpose(1, 2).flatten(2)
    torch.testing.assert_close(found[mask], expected[mask], rtol=1e-5, atol=1e-5)


def test_never_forms_a_matrix():
    assert growth(build("bigbird", dtype=torch.float32)) < 4.5


def test_bad_options_get_a_sentence():
    for options, said in (({"block": 0}, "block"), ({"random_blocks": -1}, "random_blocks")):
        with pytest.raises(InvalidInputError, match=said):
            build("bigbird", **options)
