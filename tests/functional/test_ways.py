"""How a call runs: decided once, explained in one sentence; inputs are checked once."""

import sys
from collections import Counter
from functools import partial

import pytest
import torch

import lln
from lln.checks.arguments import IMPLEMENTATIONS
from lln.checks.call import FIELDS, Call
from lln.functional import prepared_calls, ways
from lln.functional.kernel_ways import Kernels, KernelsBesidePlainBlocks
from lln.functional.plain_ways import Plain
from lln.functional.reference_way import Reference
from lln.functional.way import Prepared
from lln.functional.ways import prepare
from lln.testing import make_qkv

CALLS = {
    "lln": lambda q, k, v, **o: lln.lln_attention(q, k, v, **o),
    "diag": lambda q, k, v, **o: lln.block_diagonal_attention(q, k, v, block_size=4, **o),
    "lln_diag": lambda q, k, v, **o: lln.lln_diag_attention(q, k, v, block_size=4, **o),
    "window": lambda q, k, v, **o: lln.window_attention(q, k, v, window=4, **o),
    "pages": lambda q, k, v, **o: lln.page_attention(q, k, v, window=4, pages=2, **o),
}


KERNELS, BESIDE = Kernels(), KernelsBesidePlainBlocks()


@pytest.mark.parametrize(
    ("prepared", "sentence"),
    [
        (Prepared(Plain()), "Plain PyTorch computes the call."),
        (Prepared(Reference(), 4), "The N×N reference computes the call in float64."),
        (
            Prepared(KERNELS, value_width=256),
            "The fused kernels compute LLN attention, up to 256 channels per launch.",
        ),
        (
            Prepared(KERNELS, 64, "joint", 128),
            "The fused kernels compute LLN attention and blocks of 64 tokens in one pass, up to "
            "128 channels per launch.",
        ),
        (
            Prepared(KERNELS, 64, "separate", 128, 64),
            "The fused kernels compute LLN attention and another kernel blocks of 64 tokens, up to "
            "128 channels per launch.",
        ),
        (
            Prepared(BESIDE, 256, "eager", 128),
            "The fused kernels compute LLN attention and PyTorch blocks of 256 tokens, which "
            "fit no tile of this chip, up to 128 channels per launch.",
        ),
        (
            Prepared(KERNELS, 64, "separate", 0, 128),
            "A fused kernel computes blocks of 64 tokens, up to 128 channels per launch.",
        ),
    ],
    ids=lambda side: side.diagonal if isinstance(side, Prepared) else "",
)
def test_a_prepared_call_explains_itself(prepared, sentence):
    assert str(prepared) == sentence


def test_a_prepared_call_cannot_be_changed():
    with pytest.raises(AttributeError):
        Prepared(Plain()).block_size = 4


def test_ways_and_the_values_of_impl_are_the_same():
    assert {way.impl for way in ways.WAYS} | {"auto"} == set(IMPLEMENTATIONS)
    assert len({way.name for way in ways.WAYS}) == len(ways.WAYS)
    kinds = {kind for way in ways.WAYS for kind in way.kinds}
    # Everything is known to plain PyTorch, which refuses nothing and so comes last.
    assert kinds == set(Plain.kinds)


@pytest.mark.parametrize("impl", ["auto", "eager", "reference"])
@pytest.mark.parametrize("kind", CALLS)
def test_on_a_cpu_everything_is_plain_or_the_reference(kind, impl):
    pages = {"window": 4, "keys": 2, "page_size": 2}
    size = {"lln": {}, "window": {"window": 4}, "pages": pages}.get(kind, {"block_size": 4})
    call = Call(kind, *make_qkv(1, 2, 10, 8), **size)
    assert prepare(call, impl).impl == ("reference" if impl == "reference" else "eager")


@pytest.mark.parametrize("kind", CALLS)
def test_calls_of_one_layout_are_decided_once(monkeypatch, kind):
    decided = []
    monkeypatch.setattr(ways, "prepare", lambda *given: decided.append(1) or prepare(*given))
    for number in range(3):
        CALLS[kind](*make_qkv(1, 2, 10, 8, seed=number))
    assert len(decided) == 1
    # Other lengths, types, options and gradients are other layouts.
    CALLS[kind](*make_qkv(1, 2, 11, 8))
    CALLS[kind](*make_qkv(1, 2, 10, 8, dtype=torch.float64))
    CALLS[kind](*make_qkv(1, 2, 10, 8), impl="eager")
    CALLS[kind](*make_qkv(1, 2, 10, 8, requires_grad=True))
    assert len(decided) == 5


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_a_call_is_part_of_its_layout(name):
    query, key, value = make_qkv(1, 2, 10, 8)
    call = Call("lln_diag", query, key, value, block_size=4)
    others = {"query": value.double(), "key": value.double(), "value": value.double()}
    others |= dict.fromkeys(("alpha", "beta", "mix", "offset", "key_mask", "bounds"), query)
    other = call.replace(**{name: others.get(name, 0.5)})
    first, second = (prepared_calls.layout_of_call(one, "auto") for one in (call, other))
    assert first != second
    assert first == prepared_calls.layout_of_call(call, "auto")


def test_what_is_prepared_says_what_computes_it():
    for way in ways.WAYS:
        assert str(Prepared(way)).endswith(".")


def test_no_more_decisions_are_kept_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr(prepared_calls, "MOST_LAYOUTS", 3)
    for tokens in range(1, 8):
        lln.lln_attention(*make_qkv(1, 2, tokens, 8))
    assert len(prepared_calls._prepared) == 3


def test_arguments_are_checked_before_a_decision_is_looked_up():
    query, key, value = make_qkv(1, 2, 10, 8)
    lln.lln_attention(query, key, value)
    with pytest.raises(lln.InvalidInputError, match="alpha"):
        lln.lln_attention(query, key, value, alpha=-1.0, beta=1.0)


def masked_call():
    query, key, value = make_qkv(2, 2, 10, 8)
    mask = torch.ones(2, 10, dtype=torch.bool)
    return lln.lln_diag_attention(query, key, value, key_mask=mask, block_size=4)


def test_a_masked_call_is_asked_few_questions(monkeypatch):
    asked = []
    for way in ways.WAYS:
        for name in ("why_not", "pays"):
            own = getattr(way, name)
            note = partial(lambda own, call: asked.append(own) or own(call), own)
            monkeypatch.setattr(way, name, note, raising=False)
    masked_call()
    assert 0 < len(asked) <= 15
    asked.clear()
    masked_call()
    assert not asked


def files_passed(call):
    """The files of the package that a call passes through, imports aside."""
    found = set()

    def watch(frame, event, _):
        name = frame.f_code.co_filename
        if (
            event == "call"
            and "/src/lln/" in name
            and "/testing/" not in name
            and frame.f_code.co_name != "<module>"
        ):
            found.add(name.partition("/src/lln/")[2])

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def test_a_call_passes_through_few_files():
    masked_call()
    prepared_calls.clear()
    assert len(files_passed(masked_call)) <= 30


@pytest.mark.parametrize("kind", CALLS)
def test_calls_are_read_by_name(monkeypatch, kind):
    def refuse(call, place):
        raise AssertionError(f"a call is read by position: {place}")

    monkeypatch.setattr(Call, "__getitem__", refuse)
    CALLS[kind](*make_qkv(1, 2, 10, 8))


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
