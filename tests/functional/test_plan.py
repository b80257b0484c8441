"""The plan of a call: decided once, explained in one sentence; inputs are checked once."""

import sys
from collections import Counter

import pytest
import torch

import lln
from lln.functional import plan as planning
from lln.functional import run as running
from lln.functional.call import Call
from lln.functional.plan import Plan, plan_call
from lln.testing import make_qkv

CALLS = {
    "lln": lambda q, k, v, **o: lln.lln_attention(q, k, v, **o),
    "diag": lambda q, k, v, **o: lln.block_diagonal_attention(q, k, v, block_size=4, **o),
    "lln_diag": lambda q, k, v, **o: lln.lln_diag_attention(q, k, v, block_size=4, **o),
}


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (Plan("eager"), "Plain PyTorch computes the call."),
        (Plan("reference", "reference", 4), "The N×N reference computes the call in float64."),
        (
            Plan("triton", value_width=256),
            "The fused kernels compute LLN attention, up to 256 channels per launch.",
        ),
        (
            Plan("triton", "joint", 64, 128),
            "The fused kernels compute LLN attention and blocks of 64 tokens in one pass, up to "
            "128 channels per launch.",
        ),
        (
            Plan("triton", "beside", 64, 128, 64),
            "The fused kernels compute LLN attention and another kernel blocks of 64 tokens, up to "
            "128 channels per launch.",
        ),
        (
            Plan("triton", "eager", 256, 128),
            "The fused kernels compute LLN attention and PyTorch blocks of 256 tokens, which "
            "fit no tile of this chip, up to 128 channels per launch.",
        ),
        (
            Plan("triton", "beside", 64, 0, 128),
            "A fused kernel computes blocks of 64 tokens, up to 128 channels per launch.",
        ),
    ],
    ids=lambda side: side.diagonal if isinstance(side, Plan) else "",
)
def test_a_plan_explains_itself(plan, sentence):
    assert str(plan) == sentence


def test_a_plan_cannot_be_changed():
    with pytest.raises(AttributeError):
        Plan("eager").impl = "triton"


@pytest.mark.parametrize("impl", ["auto", "eager", "reference"])
@pytest.mark.parametrize("kind", CALLS)
def test_on_a_cpu_everything_is_plain_or_the_reference(kind, impl):
    request = Call(kind, *make_qkv(1, 2, 10, 8), block_size=0 if kind == "lln" else 4)
    plan = plan_call(request, impl)
    chosen = "reference" if impl == "reference" else "eager"
    assert plan.impl == chosen
    assert plan.diagonal == (None if kind == "lln" else chosen)


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_is_planned_once(monkeypatch, kind):
    plans = []
    monkeypatch.setattr(running, "plan_call", lambda *a: plans.append(1) or plan_call(*a))
    chosen, choose = [], planning.choose_implementation
    monkeypatch.setattr(
        planning, "choose_implementation", lambda *a: chosen.append(1) or choose(*a)
    )
    CALLS[kind](*make_qkv(1, 2, 10, 8))
    assert (len(plans), len(chosen)) == (1, 1)


def checks_made(call):
    """How often each function of `lln.checks` is called."""
    found = Counter()

    def watch(frame, event, _):
        code = frame.f_code
        if event == "call" and "/lln/checks/" in code.co_filename and "check_" in code.co_name:
            named = frame.f_locals.get("name", "")
            found[code.co_name, named if isinstance(named, str) else ""] += 1

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("kind", CALLS)
def test_inputs_are_checked_once(kind):
    query, key, value = make_qkv(2, 2, 10, 8)
    mask = torch.ones(2, 10, dtype=torch.bool)
    found = checks_made(lambda: CALLS[kind](query, key, value, key_mask=mask))
    assert found["check_qkv", ""] == 1
    assert max(found.values()) == 1, found


@pytest.mark.parametrize("join", ["average", "scale", "ratio", "gate", "heads"])
@pytest.mark.parametrize("statistics", ["sample", "running", "learned"])
def test_modules_check_their_inputs_once(join, statistics):
    layer = lln.LLNDiagAttention(
        16, 2, batch_first=True, join=join, statistics=statistics, block_size=4
    )
    x, padding = torch.randn(2, 10, 16), torch.zeros(2, 10, dtype=torch.bool)
    found = checks_made(lambda: layer(x, key_padding_mask=padding))
    assert found["check_qkv", ""] == 1
    # The module's door has three tensors and a mask of its own; heads have one door behind it.
    assert max(found.values()) == 1, found
    assert sum(found.values()) <= 12, found
