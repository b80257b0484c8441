"""The fit of the moment-matching constants, on small measurements, and the constants shipped."""

import json
import math
import sys
from importlib import resources
from pathlib import Path

import pytest
import torch
from lab.tests.commands import app
from typer.testing import CliRunner

from lln.cli import main
from lln.errors import InvalidInputError
from lln.matching.curves import matched_spread
from lln_lab.cli import add_to
from lln_lab.fitting import FitConfig, command, fit, fit_constants, injection
from lln_lab.fitting.injection import Injection

P = (0.25, 1.0, 4.0)
S = tuple(math.exp(0.12 * i) for i in range(16))
SHIPPED = json.loads(resources.files("lln.matching").joinpath("constants.json").read_text("utf-8"))


def tiny(work):
    return FitConfig(
        widths=(8, 16, 32),
        lengths=(64, 128),
        seeds=1,
        p_points=6,
        s_points=20,
        rows=32,
        keys=256,
        check_widths=(16,),
        check_lengths=(64,),
        check_p=(0.1, 1.0, 4.0),
        check_seeds=2,
        work=work,
    )


@pytest.fixture(scope="module")
def measured():
    """Curves at N = 1024 for the widths of the reference values."""
    requests = [Injection(d, 1024, 3, P, S) for d in (32, 64, 128)]
    return {request.d: (request, injection.measure(request)) for request in requests}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    work = tmp_path_factory.mktemp("fit") / "work.jsonl"
    return work, fit_constants(tiny(work))


def test_softmax_variance_within_rows_is_p(measured):
    for _, curves in measured.values():
        assert curves["softmax"]["variance"] == pytest.approx(P, rel=0.02)


def test_statistics_are_those_of_the_whole_matrix():
    q, k = injection.gaussians(8, 48, seed=0, rows=20)
    logs = {
        "softmax": injection.softmax_log_p(q, k, 2.0)[0],
        "lln": injection.lln_log_p(q, k, 3.0)[0],
    }
    curves = {
        "softmax": injection.softmax_curves(q, k, (2.0,)),
        "lln": injection.lln_curves(q, k, (3.0,)),
    }
    for side, log_p in logs.items():
        entropy = -(log_p.exp() * log_p).sum(-1).mean().item() / math.log(2)
        within = log_p.var(-1, correction=0).mean().item()
        assert curves[side]["entropy"] == pytest.approx([entropy], rel=1e-12)
        assert curves[side]["variance"] == pytest.approx([within], rel=1e-10)
        assert curves[side]["total"] == pytest.approx([log_p.var(correction=0).item()], rel=1e-10)


def test_tiles_do_not_change_the_statistics(monkeypatch):
    q, k = injection.gaussians(8, 50, seed=0, rows=20, draws=2)
    whole = injection.softmax_curves(q, k, P), injection.lln_curves(q, k, S)
    monkeypatch.setattr(injection, "_TILE", 20 * 2 * 7)
    tiled = injection.softmax_curves(q, k, P), injection.lln_curves(q, k, S)
    for one, other in zip(whole, tiled, strict=True):
        for name in injection.STATISTICS:
            assert one[name] == pytest.approx(other[name], rel=1e-10)


@pytest.mark.parametrize("s", [1.0, 6.0, 12.0])
def test_lln_log_p_loses_nothing_at_the_ends_of_the_grid(s):
    q, k = injection.gaussians(16, 400, seed=1, rows=30)
    # A and B of P = A B, multiplied in the log domain where nothing can underflow.
    log_b = (s * k).log_softmax(-2)
    log_a = (s * q + (s * k).logsumexp(-2, keepdim=True)).log_softmax(-1)
    exact = (log_a.unsqueeze(-2) + log_b.unsqueeze(-3)).logsumexp(-1)
    torch.testing.assert_close(injection.lln_log_p(q, k, s), exact, rtol=1e-10, atol=1e-10)


def test_lln_curves_are_monotone(measured):
    for _, curves in measured.values():
        assert (torch.tensor(curves["lln"]["variance"]).diff() > 0).all()
        assert (torch.tensor(curves["lln"]["entropy"]).diff() < 0).all()


@pytest.mark.parametrize(("name", "d", "p", "expected"), command.REFERENCE)
def test_measured_s_is_the_reference_value(measured, name, d, p, expected):
    request, curves = measured[d]
    log_s, _ = fit.match(name, request, curves)
    assert log_s[P.index(p)].exp().item() == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("name", "d", "p", "expected"), command.REFERENCE)
def test_shipped_s_is_the_reference_value(name, d, p, expected):
    found = fit.scale(SHIPPED["criteria"][name], torch.tensor(p, dtype=torch.float64), d, 1024)
    assert found.item() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", ["paper", "variance", "entropy"])
def test_the_library_reads_the_constants_as_the_fit_does(name):
    p = torch.tensor([0.001, 0.03, 0.7, 18.0, 100.0], dtype=torch.float64)
    for d, n in ((4, 16), (64, 1024), (200, 5000), (1024, 1 << 20)):
        ours = fit.scale(SHIPPED["criteria"][name], p, d, n)
        torch.testing.assert_close(ours, matched_spread(p, d, float(n), name))


def test_shipped_file_has_the_agreed_form():
    assert SHIPPED["criteria"]["paper"] == fit.PAPER
    for name, terms in fit.LENGTH_TERMS.items():
        criterion = SHIPPED["criteria"][name]
        assert [len(row) for row in criterion["M"]] == [3] * 5
        assert len(criterion["X"]) == terms
        assert criterion["p_range"] == list(fit.P_RANGE)
        assert criterion["d_range"] == list(fit.D_RANGE)
        assert criterion["n_range"] == list(fit.N_RANGE)


def test_paper_constants_come_out_again():
    sigma = tuple(0.8 + 0.2 * i for i in range(12))
    request = Injection(64, 512, 5, (), sigma, rows=256, keys=4096)
    found = fit.refit_paper([request], [injection.measure(request)])
    assert found["a"] == pytest.approx(fit.PAPER["a"], rel=0.06)
    assert found["b"] == pytest.approx(fit.PAPER["b"], rel=0.10)


def test_fit_recovers_known_coefficients():
    """Curves made from a polynomial give that polynomial back."""
    truth = SHIPPED["criteria"]["entropy"]
    measured = []
    for d in (8, 32, 128, 512):
        for n in (64, 1024, 16384):
            p = fit._log_grid(fit.P_RANGE, 9)
            request = Injection(d, n, 0, p, fit._log_grid((0.1, 40.0), 400))
            s = fit.scale(truth, torch.tensor(p, dtype=torch.float64), d, n)
            # Both attentions with entropy deficit 0.1 s: they agree where LLN's s is the truth.
            deficits = {"softmax": s.tolist(), "lln": request.s}
            curves = {
                side: {"entropy": [math.log2(n) - 0.1 * value for value in values]}
                for side, values in deficits.items()
            }
            measured.append((request, curves))
    found, residuals = fit.fit_criterion("entropy", measured, 4)
    torch.testing.assert_close(
        torch.tensor(found["M"]), torch.tensor(truth["M"]), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        torch.tensor(found["X"]), torch.tensor(truth["X"]), atol=1e-5, rtol=0
    )
    assert residuals["max_log_s"] < 1e-5


def test_out_of_reach_is_said_and_not_extrapolated(measured):
    request, curves = measured[64]
    short = {name: values[:4] for name, values in curves["lln"].items()}
    narrow = Injection(64, 1024, 3, P, S[:4])
    with pytest.raises(InvalidInputError, match="widen the grid of s"):
        fit.match("variance", narrow, {"softmax": curves["softmax"], "lln": short})
    swapped = {"softmax": curves["softmax"], "lln": {"variance": [2.0, 1.0]}}
    with pytest.raises(InvalidInputError, match="does not increase"):
        fit.match("variance", request, swapped)


def test_tiny_fit_matches_better_than_the_paper(fitted):
    table = fitted[1]["fit"]["validation"]["criteria"]
    assert table["variance"]["variance_mean"] < 0.5 * table["paper"]["variance_mean"]
    assert table["entropy"]["entropy_mean"] < 0.5 * table["paper"]["entropy_mean"]


def test_interrupted_fit_goes_on(fitted, tmp_path, monkeypatch):
    work, expected = fitted
    whole = work.read_bytes()
    lines = whole.splitlines(keepends=True)
    # Four measurements and a half: what a killed process leaves.
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join(lines[:4]) + lines[4][: len(lines[4]) // 2])
    made, seen = [], []
    monkeypatch.setattr(fit, "measure", lambda r, d: made.append(r) or injection.measure(r, d))
    again = fit_constants(tiny(cut), lambda done, total, text: seen.append((done, total, text)))
    assert again == expected
    assert len(made) == len(lines) - 4
    assert [done for done, _, _ in seen] == list(range(1, len(lines) + 1))
    assert {total for _, total, _ in seen} == {len(lines)}
    made.clear()
    assert fit_constants(tiny(cut)) == expected
    assert not made


def test_command_writes_and_reports(fitted, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "fit_constants", lambda config, progress: fitted[1])
    out = tmp_path / "new" / "constants.json"
    words = ["fit", "--quick", "--out", str(out), "--work", str(tmp_path / "w.jsonl")]
    printed = CliRunner().invoke(app, words, catch_exceptions=False).output
    assert json.loads(out.read_text()) == fitted[1]
    assert "2.274" in printed
    assert "fresh seeds" in printed


def test_an_interrupted_command_says_that_it_continues(tmp_path, monkeypatch, capsys):
    def stop(request, device):
        raise KeyboardInterrupt

    monkeypatch.setattr(fit, "measure", stop)
    work = tmp_path / "w.jsonl"
    words = ["lln", "fit", "--out", str(tmp_path / "c.json"), "--work", str(work)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as stopped:
        main(add_to)
    assert stopped.value.code == 130
    said = capsys.readouterr().out.splitlines()
    assert said == [f"Stopped; the same command goes on with the measurements in {work}."]


@pytest.mark.slow
def test_figures_are_written(tmp_path):
    from lln_lab.figures.matched_moments import draw_figures

    written = draw_figures(SHIPPED, tmp_path / "figures")
    names = ["figure-5b.svg", "figure-5b.png", "figure-7.svg", "figure-7.png"]
    assert [path.name for path in written] == names
    assert all(path.stat().st_size > 10_000 for path in written)


def test_full_grid_covers_the_declared_ranges():
    config = FitConfig()
    assert (min(config.widths), max(config.widths)) == fit.D_RANGE
    assert (min(config.lengths), max(config.lengths)) == fit.N_RANGE
    assert config.requests()[0].p[0] == fit.P_RANGE[0]
    assert config.requests()[0].p[-1] == fit.P_RANGE[1]
    assert config.work == Path("lln-fit.jsonl")
