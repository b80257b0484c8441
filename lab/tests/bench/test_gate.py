"""Correctness before speed: what is wrong gets no time."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from lln_lab.bench.attention_bench import measure_case
from lln_lab.bench.cases import DENSE, PACKED, Case, sequence_ends
from lln_lab.bench.gate import EXACT_TOKENS, Checker
from lln_lab.bench.operations import OPERATIONS

HERE = [
    name
    for name in OPERATIONS
    if not any(word in name for word in ("flash", "cudnn", "fla_", "compiled"))
]


def case_of(name, tokens=40, backward=True, dtype="float32"):
    backward = backward and not OPERATIONS[name].forward_only
    return Case(name, 2, 3, tokens, 16, dtype, backward)


def judge(operation, case):
    return Checker("cpu").judge(operation, case, operation.layout.make(case, "cpu", 0))


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("tokens", [40, EXACT_TOKENS + 30])
def test_registered_operations_are_right(name, tokens):
    verdict = judge(OPERATIONS[name], case_of(name, tokens))
    assert verdict.passed, verdict
    assert verdict.allowed > 0


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("name", ["sdpa", "lln", "lln_matched"])
def test_half_precision_is_judged_by_its_own_rounding(name):
    assert judge(OPERATIONS[name], case_of(name, dtype="bfloat16")).passed


def test_the_definition_of_linear_attention_agrees_with_a_loop():
    query, key, value = torch.randn(3, 1, 5, 2, 4, dtype=torch.float64)
    query, key = query.abs(), key.abs()
    raw = OPERATIONS["fla_causal_raw"].exact(query, key, value)
    normalised = OPERATIONS["fla_causal"].exact(query, key, value)
    state = torch.zeros(1, 2, 4, 4, dtype=torch.float64)
    for step in range(5):
        state = state + key[:, step].unsqueeze(-1) * value[:, step].unsqueeze(-2)
        expected = (query[:, step].unsqueeze(-2) @ state).squeeze(-2)
        torch.testing.assert_close(raw[:, step], expected / 2)
        mass = (query[:, step] * key[:, : step + 1].sum(1)).sum(-1, keepdim=True)
        torch.testing.assert_close(normalised[:, step], expected / mass)


def test_inputs_of_normalised_linear_attention_are_positive():
    query, key, _ = OPERATIONS["fla_causal"].layout.make(case_of("fla_causal"), "cpu", 0)
    assert (query > 0).all()
    assert (key > 0).all()


def test_a_wrong_output_is_refused():
    right = OPERATIONS["lln"]
    wrong = replace(right, run=lambda *inputs: right.run(*inputs) * 1.001)
    verdict = judge(wrong, case_of("lln", backward=False))
    assert not verdict.passed
    assert verdict.what == "output"


def test_a_wrong_gradient_is_refused_though_the_output_is_right():
    right = OPERATIONS["sdpa"]

    def run(query, key, value):
        return right.run(query, key + 0.01 * (key - key.detach()), value)

    wrong = replace(right, run=run)
    assert judge(wrong, case_of("sdpa", backward=False)).passed
    verdict = judge(wrong, case_of("sdpa"))
    assert not verdict.passed
    assert verdict.what == "gradient of key"


def test_not_a_number_is_refused():
    right = OPERATIONS["sdpa"]
    wrong = replace(right, run=lambda *inputs: right.run(*inputs) * torch.nan)
    assert not judge(wrong, case_of("sdpa")).passed


def test_an_error_that_only_long_sequences_show_is_refused():
    right = OPERATIONS["lln"]

    def run(query, key, value):
        out = right.run(query, key, value)
        return out if query.shape[2] <= EXACT_TOKENS else out * 1.001

    wrong = replace(right, run=run)
    assert judge(wrong, case_of("lln", EXACT_TOKENS)).passed
    assert not judge(wrong, case_of("lln", EXACT_TOKENS + 1)).passed


def test_plain_pytorch_that_is_wrong_cannot_vouch_for_itself():
    """Beyond the exact lengths the plain form judges; it must have been judged itself."""
    right = OPERATIONS["lln"]

    def shifted(*inputs, **options):
        return right.plain(*inputs) * 1.001

    wrong = replace(right, run=shifted, plain=shifted)
    assert not judge(wrong, case_of("lln", EXACT_TOKENS + 1)).passed


def test_a_wrong_operation_gets_no_time(monkeypatch):
    right = OPERATIONS["lln"]
    wrong = replace(right, run=lambda *inputs: right.run(*inputs) + 1.0)
    monkeypatch.setitem(OPERATIONS, "lln", wrong)
    row = measure_case(case_of("lln"), Checker("cpu"), 0.001, 1.0)
    assert row["status"] == "wrong"
    assert row["error"] > row["allowed"]
    assert "milliseconds" not in row


def test_packed_sequences_hold_all_tokens():
    for batch, tokens in ((1, 8), (2, 8), (3, 8), (4, 7)):
        ends = sequence_ends(batch, tokens)
        assert ends[0] == 0
        assert ends[-1] == batch * tokens
        assert len(ends) == batch + 1
        assert all(b > a for a, b in pairwise(ends))


def test_the_compared_part_is_the_last_sample_of_the_outer_heads():
    tensor = torch.arange(2 * 5 * 3).reshape(2, 5, 3, 1)
    torch.testing.assert_close(DENSE.few(tensor), tensor[1:, [0, 4]])
    torch.testing.assert_close(PACKED.few(tensor[0]), tensor[0][:, [0, 2]])
    assert DENSE.few(tensor[:, :1]).shape[1] == 1
