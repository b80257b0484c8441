"""Every name that has to be chosen from a list is refused alike, with the one that was meant."""

import pytest
import torch

import lln
from lln import InvalidInputError, instruments, peers
from lln.checks.names import check_choice, check_choices, did_you_mean
from lln.instruments.measurements import Measurements
from lln.integrations.settings import Settings
from lln.peers.listing import check_names
from lln.studies.bench import suites
from lln.studies.bench.command import Options
from lln.studies.bench.roberta_bench import run_roberta
from lln.studies.figures import command

QUERY, KEY, VALUE = torch.randn(3, 1, 2, 4, 8).unbind()
FIGURE = {"out": None, "results": None, "device": "cpu", "quick": True, "echo": print}
SIZES = {"embed_dim": 16, "num_heads": 2, "max_len": 8}


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
        (lambda: Settings(sliding_window="sofmax"), "'softmax'"),
        (lambda: Settings(attached=True, mix="scael"), "'scale'"),
        (lambda: Settings.of(type("C", (), {"lln": {"matchin": "paper"}})), "'matching'"),
        (lambda: peers.build("perfomer", **SIZES), "'performer'"),
        (lambda: peers.build("LLN-Diag", **SIZES), "'lln_diag'"),
        (lambda: peers.card("nystrom_former"), "'nystromformer'"),
        (lambda: peers.build("performer", **SIZES, feature=4), "'features'"),
        (lambda: peers.build("performer", **SIZES, kernel="rel"), "'relu'"),
        (lambda: peers.build("performer", **SIZES, compat="skyforme"), "'skyformer'"),
        (lambda: peers.build("linformer", **SIZES, compat="skyforme"), "'skyformer'"),
        (lambda: peers.build("linformer", **SIZES, shared="headwize"), "'headwise'"),
        (lambda: peers.build("hedgehog", **SIZES, form="sofmax"), "'softmax'"),
        (lambda: peers.build("lion_s", **SIZES, features="sillu"), "'silu'"),
        (lambda: peers.build("flash", **SIZES, scale="chunks"), "'chunk'"),
        (lambda: peers.build("transnormer_t1", **SIZES, compat="release"), "'released'"),
        (lambda: peers.build("skyformer", **SIZES, compat="orginal"), "'original'"),
        (lambda: peers.build("rfa", **SIZES, compat="release"), "'released'"),
        (lambda: peers.build("nystromformer", **SIZES, compat="release"), "'released'"),
        (lambda: peers.build("synthesizer", **SIZES, variant="dens"), "'dense'"),
        (lambda: peers.build("sparse_transformer", **SIZES, pattern="stride"), "'strided'"),
        (lambda: peers.Encoder("lln", depth=1, **SIZES, norm="pree"), "'pre'"),
        (lambda: command.run("theorie", **FIGURE), "'theory'"),
        (lambda: check_names(["sofmax"], "--systems"), "softmax"),
        (lambda: suites.choose_cases("cpu", operations=["llnn"]), "lln"),
        (lambda: run_roberta(Options(print), systems=["lnl"]), "lln"),
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
    with pytest.raises(InvalidInputError, match=r"^--x must be among a, b, got y, z\.$"):
        check_choices("--x", ["a", "y", "z"], ("a", "b"))


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


def test_an_unknown_attention_near_nothing_gets_every_name():
    with pytest.raises(InvalidInputError) as caught:
        peers.build("magic", **SIZES)
    assert all(name in str(caught.value) for name in peers.available())


def test_capitals_and_hyphens_do_not_hide_a_name():
    assert did_you_mean("Soft-Max", ("softmax",)) == " (did you mean 'softmax'?)"
