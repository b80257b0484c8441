"""Nothing of size N×N is held while long sequences are measured."""

import pytest
import torch
from tests.memory import peak_bytes

from lln import instruments

LINEAR = [("spectral_gap", "lln"), ("variance", "lln"), ("entropy", "diag")]
LINEAR += [("score_variance", "lln"), ("entropy", "window"), ("temperature", "window")]
ROW_BY_ROW = [
    ("entropy", "softmax"),
    ("entropy", "lln"),
    ("log_normality", "softmax"),
    ("log_normality", "lln_diag"),
    ("spectral_gap", "lln_diag"),
    ("temperature", "lln_diag"),
    ("entropy", "lln_keys"),
    ("spectral_gap", "lln_keys"),
]


def peak_of(name, kind, tokens):
    """Bytes at the peak of measuring one head."""

    def measure(query, key):
        found = getattr(instruments, name)(query, key, kind=kind)
        assert (found if isinstance(found, torch.Tensor) else found[0]).isfinite().all()

    # What is imported on the way is not part of a measurement.
    measure(*torch.randn(2, 1, 1, 300, 64))
    query, key = torch.randn(2, 1, 1, tokens, 64)
    return peak_bytes(lambda: measure(query, key))


@pytest.mark.parametrize("case", LINEAR, ids="-".join)
def test_what_is_linear_takes_little_memory(case):
    """One N×N matrix in float64 would be 8 GiB."""
    assert peak_of(*case, tokens=32768) < 128 << 20


@pytest.mark.slow
@pytest.mark.parametrize("case", ROW_BY_ROW, ids="-".join)
def test_row_by_row_takes_less_than_the_matrix(case):
    """One N×N matrix in float64 is 128 MiB."""
    assert peak_of(*case, tokens=4096) < 100 << 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", ROW_BY_ROW, ids="-".join)
def test_one_head_of_32768_tokens_stays_within_half_a_gib(case):
    assert peak_of(*case, tokens=32768) < 512 << 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_iterated_gap_of_long_softmax_attention_never_forms_the_matrix():
    """P of 8,192 tokens is 512 MiB."""
    assert peak_of("spectral_gap", "softmax", tokens=8192) < 128 << 20
