"""What peers and commands refuse, and that the sentence names what was meant."""

import pytest
import torch

from lln.errors import InvalidInputError, UnexpectedArgumentError
from lln_lab import peers
from lln_lab.bench import suites
from lln_lab.bench.command import Options
from lln_lab.bench.roberta_bench import run_roberta
from lln_lab.figures import command
from lln_lab.peers.listing import check_names

FIGURE = {"out": None, "results": None, "device": "cpu", "quick": True, "echo": print}
SIZES = {"embed_dim": 32, "num_heads": 2, "max_len": 8}
X = torch.randn(2, 6, 32)
P = torch.randn(2, 4, 6, 6).softmax(-1)
ENCODER = peers.Encoder("elu", depth=1, **SIZES)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: peers.build("lln", embed_dim=X, num_heads=2, max_len=8), "embed_dim .* Tensor"),
        (lambda: peers.build("lln", **SIZES, layer=X), "layer must be .* got Tensor"),
        (lambda: peers.Encoder("lln", depth=None, **SIZES), "depth must be .* got None"),
        (lambda: peers.Encoder("lln", depth=True, **SIZES), "depth must be .* got True"),
        (lambda: peers.Encoder("lln", depth=1, **SIZES, vocabulary=True), "vocabulary .* True"),
        (lambda: ENCODER([1.0]), "x must be a tensor .* got list"),
        (lambda: ENCODER(X[0]), r"x must be a tensor .* got \[6, 32\]"),
        (lambda: ENCODER(X.double()), "x is torch.float64 and the weights"),
        (lambda: ENCODER(X.to_sparse()), r"x\.to_dense\(\)"),
        (lambda: ENCODER(X, key_mask=P[0, 0]), "key_mask must be bool"),
        (lambda: peers.masked_mean([1.0]), "hidden must be .* got list"),
        (lambda: peers.masked_mean(X[0, 0]), r"hidden must be .* got \[32\]"),
        (lambda: peers.masked_mean(X, [True]), "key_mask must be bool"),
    ],
)
def test_misuse_gets_a_sentence(call, said):
    with pytest.raises(InvalidInputError, match=said) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 300, message


@pytest.mark.parametrize(
    ("call", "meant"),
    [
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


def test_an_unknown_attention_near_nothing_gets_every_name():
    with pytest.raises(InvalidInputError) as caught:
        peers.build("magic", **SIZES)
    assert all(name in str(caught.value) for name in peers.available())


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: peers.build("lln"), "build needs embed_dim, num_heads and max_len"),
        (lambda: peers.Encoder("lln", depth=1), "Encoder needs embed_dim"),
    ],
)
def test_constructors_name_what_they_need(build, said):
    with pytest.raises(UnexpectedArgumentError, match=said):
        build()
