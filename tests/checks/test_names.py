"""Every name that has to be chosen from a list is refused alike, with the one that was meant."""

import pytest
import torch

import lln
from lln import InvalidInputError, instruments
from lln.checks.names import check_choice, did_you_mean
from lln.instruments.measurements import Measurements
from lln.integrations.settings import Settings

QUERY, KEY, VALUE = torch.randn(3, 1, 2, 4, 8).unbind()


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: lln.lln_attention(QUERY, KEY, VALUE, matching="varience"), "'variance'"),
        (lambda: lln.lln_attention(QUERY, KEY, VALUE, impl="egaer"), "'eager'"),
        (lambda: lln.match_moments(QUERY, KEY, scope="heads"), "'head'"),
        (lambda: lln.calibrate(QUERY, KEY, scope="bacth"), "'batch'"),
        (lambda: lln.LLNCore(2, 8, statistics="runing"), "'running'"),
        (lambda: lln.LLNDiagCore(2, 8, join="avarage"), "'average'"),
        (lambda: instruments.entropy(QUERY, KEY, kind="sofmax"), "'softmax'"),
        (
            lambda: instruments.capture(torch.nn.Linear(2, 2), instruments="entrpy"),
            "'entropy'",
        ),
        (lambda: Settings(statistics="smaple"), "'sample'"),
        (lambda: Settings(attached=True, mix="scael"), "'scale'"),
        (lambda: Settings.of(type("C", (), {"lln": {"matchin": "paper"}})), "'matching'"),
    ],
)
def test_a_name_misspelt_is_answered_with_the_one_that_was_meant(call, meant):
    with pytest.raises(InvalidInputError) as caught:
        call()
    assert f"(did you mean {meant}?)" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_instrument_that_was_not_measured_but_nearly(monkeypatch):
    seen = Measurements()
    monkeypatch.setattr(
        seen, "calls", [type("C", (), {"values": {"entropy": None}, "layer": "", "first_head": 0})]
    )
    with pytest.raises(InvalidInputError, match=r"\(did you mean 'entropy'\?\)"):
        seen.medians("entropi")


def test_what_is_near_nothing_gets_the_list_alone():
    with pytest.raises(InvalidInputError, match=r"^x must be 'head' or 'tensor', got 'zzz'\.$"):
        check_choice("x", "zzz", ("head", "tensor"))
    with pytest.raises(InvalidInputError, match=r"^x must be one of 'a', 'b', 'c', got 'zzz'\.$"):
        check_choice("x", "zzz", ("a", "b", "c"))


@pytest.mark.parametrize(
    ("given", "seen"),
    [(3, "3"), (["head"], "list"), (torch.zeros(900), "Tensor"), (True, "True")],
    ids=["int", "list", "tensor", "bool"],
)
def test_what_is_no_name_is_refused_by_its_type(given, seen):
    with pytest.raises(InvalidInputError, match=f"got {seen}"):
        check_choice("x", given, ("head", "tensor"))


def test_none_counts_only_where_it_may_be_chosen():
    check_choice("compat", None, (None, "fla"))
    with pytest.raises(InvalidInputError, match="got None"):
        check_choice("form", None, ("softmax", "exp"))


def test_capitals_and_hyphens_do_not_hide_a_name():
    assert did_you_mean("Soft-Max", ("softmax",)) == " (did you mean 'softmax'?)"
