"""The causal scan: fast and exact form, the guard between them, padding, odd lengths."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lln import lln_attention, lln_attention_varlen, reference
from lln.eager import causal
from lln.eager.scan import BLOCK, running_merge
from lln.testing import assert_close, make_qkv
from lln.testing.tolerances import EAGER_ROUNDINGS

CHUNK = causal.CHUNK
SCALES = {"alpha": 1.5, "beta": 2.0}


def by_cumulative_sums(query, key, value, alpha, beta):
    """Eq. (8) with running sums, in float64 and without any stabiliser: linear in T."""
    query, key = (alpha * query.double()).exp(), (beta * key.double()).exp()
    mass = key.cumsum(-2)
    weighted = (key.unsqueeze(-1) * value.double().unsqueeze(-2)).cumsum(-3)
    total = torch.einsum("...td,...tde->...te", query, weighted)
    return total / (query * mass).sum(-1, keepdim=True)


def exact(query, key, value, mask=None):
    keep = reference.causal_keep(query.shape[-2])
    if mask is not None:
        keep = keep & mask[:, None, None, :]
    doubles = (tensor.double() for tensor in (query, key, value))
    return reference.lln_attention(*doubles, *SCALES.values(), keep=keep)


@pytest.fixture
def exact_chunks(monkeypatch):
    """The number of chunks in every call of the exact path."""
    counts, original = [], causal._exact

    def counted(chunks):
        counts.append(chunks.query.shape[:-2].numel())
        return original(chunks)

    monkeypatch.setattr(causal, "_exact", counted)
    return counts


@pytest.fixture
def always_exact(monkeypatch):
    monkeypatch.setattr(causal, "_may_branch_on_values", lambda tensor: False)


LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193]
LONG = [CHUNK * BLOCK + extra for extra in (-65, -64, -63, -1, 0, 1, 63, 64, 65)]
VERY_LONG = [CHUNK * BLOCK * BLOCK + extra for extra in (-1, 0, 1)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tokens", LENGTHS + LONG)
def test_lengths_around_chunks_and_blocks(tokens, dtype, exact_chunks):
    query, key, value = make_qkv(1, 2, tokens, 3, dtype=dtype)
    found = lln_attention(query, key, value, **SCALES, is_causal=True)
    assert_close(found, by_cumulative_sums(query, key, value, *SCALES.values()))
    assert not exact_chunks


@pytest.mark.parametrize("tokens", VERY_LONG)
def test_three_levels_of_the_scan(tokens):
    query, key, value = make_qkv(1, 1, tokens, 2, value_width=1)
    found = lln_attention(query, key, value, **SCALES, is_causal=True)
    assert_close(found, by_cumulative_sums(query, key, value, *SCALES.values()))


@pytest.mark.usefixtures("always_exact")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tokens", [*LENGTHS, *LONG[-3:]])
def test_exact_path_is_the_fast_path(tokens, dtype):
    query, key, value = make_qkv(1, 2, tokens, 3, dtype=dtype)
    found = lln_attention(query, key, value, **SCALES, is_causal=True)
    assert_close(found, by_cumulative_sums(query, key, value, *SCALES.values()))


@pytest.mark.usefixtures("always_exact")
@pytest.mark.parametrize("kind", ["left", "holes", "all"])
def test_exact_path_with_a_mask(kind):
    query, key, value = make_qkv(2, 2, 150, 3)
    mask = {
        "left": torch.arange(150).expand(2, 150) >= 70,
        "holes": torch.rand(2, 150) < 0.5,
        "all": torch.zeros(2, 150).bool(),
    }[kind]
    found = lln_attention(query, key, value, **SCALES, key_mask=mask, is_causal=True)
    assert_close(found, exact(query, key, value, mask))


@pytest.mark.parametrize("scale", [0.1, 1.0, 2.0])
def test_ordinary_input_never_needs_the_exact_path(scale, exact_chunks):
    query, key, value = make_qkv(2, 4, 300, 16, scale=scale)
    lln_attention(query, key, value, **SCALES, is_causal=True)
    assert exact_chunks == []


@pytest.mark.parametrize(
    ("spoiled", "chunks"),
    [([(0, 0, 100)], 1), ([(0, 0, 100), (0, 0, 90)], 1), ([(0, 1, 63), (1, 0, 200)], 2)],
)
def test_only_the_offending_chunks_take_the_exact_path(spoiled, chunks, exact_chunks):
    query, key, value = make_qkv(2, 2, 256, 4)
    # Every feature of the outlier is far above: rows before it in its chunk lose their digits.
    for batch, head, token in spoiled:
        key[batch, head, token] = 80.0
    found = lln_attention(query, key, value, **SCALES, is_causal=True)
    assert exact_chunks == [chunks]
    assert_close(found, exact(query, key, value))


@pytest.mark.parametrize("token", [64, 128])
def test_outlier_that_opens_a_chunk_needs_no_exact_path(token, exact_chunks):
    query, key, value = make_qkv(1, 1, 192, 4)
    key[0, 0, token] = 80.0
    found = lln_attention(query, key, value, **SCALES, is_causal=True)
    assert exact_chunks == []
    assert_close(found, exact(query, key, value))


@pytest.mark.parametrize("size", [10.0, 20.0, 28.0, 30.0, 40.0, 44.0, 46.0, 48.0, 50.0, 1e3])
@pytest.mark.parametrize("features", [1, 4])
def test_both_sides_of_the_guard(size, features):
    inputs = make_qkv(1, 2, 70, 4)
    inputs[1][..., 40, :features] = size
    leaves = [tensor.requires_grad_() for tensor in inputs]
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    found = lln_attention(*leaves, **SCALES, is_causal=True)
    wanted = exact(*doubles)
    assert_close(found, wanted)
    upstream = torch.randn_like(found)
    grads = torch.autograd.grad(found, leaves, upstream)
    for grad, expected in zip(
        grads, torch.autograd.grad(wanted, doubles, upstream.double()), strict=True
    ):
        assert_close(grad, expected, backward=True)


@pytest.mark.parametrize("size", [300.0, 340.0, 400.0])
def test_guard_in_float64(size, exact_chunks):
    query, key, value = make_qkv(1, 1, 70, 4, dtype=torch.float64)
    key[..., 40, :] = size
    found = lln_attention(query, key, value, **SCALES, is_causal=True)
    wanted = exact(query, key, value)
    # Rounding an exponent β·k of 600 is felt in the weights.
    blurred = SCALES["beta"] * size / EAGER_ROUNDINGS * wanted.abs().max().item()
    assert_close(found, wanted, magnitude=blurred)
    assert exact_chunks == ([] if size == 300.0 else [1])


def test_all_chunks_refused(exact_chunks):
    query, key, value = make_qkv(1, 2, 128, 4)
    key[:, :, 30::64] = 80.0
    key[:, :, 94:] += 100.0
    found = lln_attention(query, key, value, **SCALES, is_causal=True)
    assert exact_chunks
    assert_close(found, exact(query, key, value))


@pytest.mark.parametrize("padded", [1, 63, 64, 65, 127, 128, 129, 190, 199, 200])
def test_left_padding(padded, exact_chunks):
    query, key, value = make_qkv(2, 2, 200, 3)
    mask = torch.ones(2, 200, dtype=torch.bool)
    mask[0, :padded] = False
    found = lln_attention(query, key, value, **SCALES, key_mask=mask, is_causal=True)
    assert not found[0, :, :padded].any()
    assert_close(found, exact(query, key, value, mask))
    assert exact_chunks == []


@pytest.mark.parametrize("padded", [CHUNK * BLOCK - 1, CHUNK * BLOCK, CHUNK * BLOCK + 65])
def test_left_padding_by_whole_blocks(padded):
    tokens = CHUNK * BLOCK + 100
    query, key, value = make_qkv(1, 1, tokens, 2)
    mask = torch.arange(tokens).expand(1, tokens) >= padded
    found = lln_attention(query, key, value, **SCALES, key_mask=mask, is_causal=True)
    assert not found[:, :, :padded].any()
    valid = (side[:, :, padded:] for side in (query, key, value))
    assert_close(found[:, :, padded:], by_cumulative_sums(*valid, *SCALES.values()))


def test_padding_rows_give_no_gradient():
    inputs = make_qkv(1, 1, 300, 3, requires_grad=True)
    mask = torch.arange(300).expand(1, 300) >= 200
    out = lln_attention(*inputs, **SCALES, key_mask=mask, is_causal=True)
    grads = torch.autograd.grad(out[:, :, :200].square().sum() + out[:, :, :200].sum(), inputs)
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("first", [0, 5, 64, 130])
def test_holes(first):
    query, key, value = make_qkv(2, 2, 200, 3)
    mask = torch.rand(2, 200) < 0.3
    mask[:, :first] = False
    found = lln_attention(query, key, value, **SCALES, key_mask=mask, is_causal=True)
    assert_close(found, exact(query, key, value, mask))


@pytest.mark.parametrize(
    "lengths", [[0], [0, 0], [0, 3, 0], [64, 0, 64], [0, 65, 0, 0, 1, 130, 0], [1] * 40], ids=str
)
def test_varlen_with_empty_sequences(lengths):
    packed = [torch.randn(sum(lengths), 2, 3) for _ in range(3)]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    found = lln_attention_varlen(*packed, bounds, **SCALES, is_causal=True)
    assert found.shape == packed[2].shape
    for part, *inputs in zip(*(side.split(lengths) for side in (found, *packed)), strict=True):
        dense = (side.transpose(0, 1)[None] for side in inputs)
        if part.numel():
            assert_close(part.transpose(0, 1)[None], exact(*dense))


def test_varlen_outlier_concerns_its_own_chunk(exact_chunks):
    packed = [torch.randn(200, 2, 3) for _ in range(3)]
    packed[1][100, 0] = 80.0
    bounds = torch.tensor([0, 70, 130, 200])
    found = lln_attention_varlen(*packed, bounds, **SCALES, is_causal=True)
    assert exact_chunks == [1]
    for start, end in ((0, 70), (70, 130), (130, 200)):
        dense = (side[start:end].transpose(0, 1)[None] for side in packed)
        assert_close(found[start:end].transpose(0, 1)[None], exact(*dense))


def test_more_tiles_than_a_block_of_the_scan():
    lengths = [65, 1, 64, 0, 130] * 12
    packed = [torch.randn(sum(lengths), 1, 2) for _ in range(3)]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    for is_causal in (False, True):
        found = lln_attention_varlen(*packed, bounds, **SCALES, is_causal=is_causal)
        for part, *inputs in zip(*(side.split(lengths) for side in (found, *packed)), strict=True):
            dense = [side.double().transpose(0, 1)[None] for side in inputs]
            if not part.numel():
                continue
            keep = reference.causal_keep(len(part)) if is_causal else None
            wanted = reference.lln_attention(*dense, *SCALES.values(), keep=keep)
            assert_close(part.transpose(0, 1)[None], wanted)


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 65, 1024, 1025])
@pytest.mark.parametrize("segmented", [False, True])
def test_running_merge_is_a_scan(count, segmented):
    log_mass = 3 * torch.randn(2, count, 3, dtype=torch.float64)
    centroid = torch.randn(2, count, 3, 2, dtype=torch.float64)
    segment = (torch.rand(count) < 0.1).cumsum(0) if segmented else None
    found_mass, found_centroid = running_merge(log_mass, centroid, segment)
    same = segment if segmented else torch.zeros(count, dtype=torch.int64)
    mass = log_mass.exp()
    total, weighted = torch.empty_like(mass), torch.empty_like(centroid)
    for place in range(count):
        start = int((same < same[place]).sum())
        total[:, place] = mass[:, start : place + 1].sum(1)
        parts = mass.unsqueeze(-1) * centroid
        weighted[:, place] = parts[:, start : place + 1].sum(1)
    torch.testing.assert_close(found_mass, total.log(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found_centroid, weighted / total.unsqueeze(-1))


def test_running_merge_of_nothing_stays_empty():
    log_mass = torch.tensor([-1e30, -1e30, 0.5, -1e30, 1.0]).reshape(5, 1)
    centroid = torch.tensor([0.0, 0.0, 2.0, 0.0, 4.0]).reshape(5, 1, 1)
    merged_mass, merged = running_merge(log_mass, centroid)
    assert (merged_mass[:2] <= -5e29).all()
    # No key yet: whatever reads this must find zeros, not what comes later.
    assert merged.flatten().tolist()[:4] == [0.0, 0.0, 2.0, 2.0]


@given(
    tokens=st.integers(1, 200),
    width=st.integers(1, 5),
    spikes=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from([-300, -45, 20, 45, 80, 300])),
        max_size=4,
    ),
    first=st.floats(0, 1),
    kept=st.sampled_from([0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**20),
)
def test_any_spikes_under_any_mask(tokens, width, spikes, first, kept, seed):
    inputs = make_qkv(1, 2, tokens, width, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for place, size in spikes:
        features = torch.rand(width, generator=generator) < 0.7
        inputs[1][:, 0, int(place * tokens), features] = float(size)
    mask = torch.rand(1, tokens, generator=generator) < kept
    mask[:, : int(first * tokens)] = False
    leaves = [tensor.requires_grad_() for tensor in inputs]
    found = lln_attention(*leaves, **SCALES, key_mask=mask, is_causal=True)
    wanted = exact(*(tensor.detach() for tensor in inputs), mask)
    exponent = SCALES["beta"] * inputs[1].abs().max().item()
    blurred = exponent / EAGER_ROUNDINGS * wanted.abs().max().item()
    assert_close(found, wanted, magnitude=blurred)
    found.square().sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
