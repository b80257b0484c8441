"""Sparse Transformer against sums over its key sets, written out token by token."""

import math

import pytest
import torch
from lab.tests.peers.contract import build

from lln import reference
from lln.errors import InvalidInputError


def sees(pattern, i, j, stride, summary, is_causal):
    """Whether query i may see key j, from the paper's sets."""
    if is_causal and j > i:
        return False
    if pattern == "strided":
        return abs(i - j) < stride or abs(i - j) % stride == 0
    return i // stride == j // stride or j % stride in range(stride - summary, stride)


def loop(query, key, value, mask, pattern, stride, summary, is_causal):
    """One head, one row at a time."""
    rows = []
    for i in range(len(query)):
        keys = [
            j
            for j in range(len(key))
            if mask[j] and sees(pattern, i, j, stride, summary, is_causal)
        ]
        scores = torch.stack([query[i] @ key[j] for j in keys]) / math.sqrt(query.shape[-1])
        rows.append(scores.softmax(0) @ value[keys])
    return torch.stack(rows)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("pattern", "stride", "summary"),
    [("strided", 4, 1), ("strided", 1, 1), ("fixed", 5, 2), ("fixed", 4, 4)],
)
@pytest.mark.parametrize("length", [3, 16, 22])
def test_every_row_is_a_softmax_over_its_set(pattern, stride, summary, length, is_causal):
    core = build(
        "sparse_transformer",
        pattern=pattern,
        stride=stride,
        summary=summary,
        is_causal=is_causal,
    ).core
    query, key, value = torch.randn(3, 1, 2, length, 16, dtype=torch.float64)
    mask = torch.ones(1, length, dtype=torch.bool)
    for hidden in ([], [1, length - 1]):
        mask[0, hidden] = False
        real = mask[0] if hidden else torch.ones(length, dtype=torch.bool)
        found = core(query, key, value, mask)
        dense = core.matrix(query, key, mask) @ value
        for head in range(2):
            one = (side[0, head] for side in (query, key, value))
            expected = loop(*one, mask[0], pattern, stride, summary, is_causal)
            torch.testing.assert_close(found[0, head][real], expected[real])
            torch.testing.assert_close(dense[0, head][real], expected[real])


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_a_stride_over_the_whole_length_is_softmax(pattern):
    core = build("sparse_transformer", pattern=pattern, stride=30).core
    query, key, value = torch.randn(3, 1, 2, 20, 16, dtype=torch.float64)
    expected = reference.softmax_attention(query, key, value)
    torch.testing.assert_close(core(query, key, value), expected)


@pytest.mark.parametrize(
    ("max_len", "stride", "summary"), [(1, 1, 1), (96, 10, 1), (1024, 32, 4), (65536, 256, 8)]
)
def test_default_sizes(max_len, stride, summary):
    core = build("sparse_transformer", max_len=max_len).core
    assert (core.stride, core.summary) == (stride, summary)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pattern": "random"}, "'strided' or 'fixed'"),
        ({"stride": 0}, "stride"),
        ({"summary": 0}, "summary"),
        ({"stride": 4, "summary": 5}, "at most the stride, 4"),
    ],
)
def test_bad_options(options, said):
    with pytest.raises(InvalidInputError, match=said):
        build("sparse_transformer", **options)
