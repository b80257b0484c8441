"""Where the paper's theory holds and where it fails: the numbers of docs/instruments.md.

Inputs are Gaussian, as the theory assumes. N×N matrices are formed, because the theorems are about
them.
"""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lln import instruments, match_moments
from lln.instruments import of_matrix
from lln.matching.curves import matched_spread
from lln_lab.figures import theory
from lln_lab.figures.setting import Results, Setting
from lln_lab.figures.style import LOOKS, NAMES, plain_ticks, title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (9.6, 4.0)

_KINDS = ("softmax", "variance", "entropy")
_FENTON = (0.2, 0.5, 1.0, 2.0, 4.0, 7.0, 15.0, 30.0)


def measure(setting: Setting) -> Results:
    """For every claim, what the theory predicts and what is measured."""
    tokens, width, draws = (96, 32, 2) if setting.quick else (512, 64, 5)
    found: Results = {"tokens": tokens, "head_width": width, "draws": draws}
    parts = {
        "theorem_3_3": lambda: _theorem_3_3(setting, tokens, width, draws),
        "shape_of_log_p": lambda: _shape(setting, tokens, width, draws),
        "equation_32": lambda: _equation_32(setting, tokens, width, draws),
        "proposition_3_1_mean": lambda: _proposition_3_1(setting, width),
        "equation_28": lambda: _fenton(setting, width),
        "equation_27": lambda: _narrow(setting, width),
        "theorem_3_2_slope": lambda: _slope(setting, tokens, width),
        "temperature": lambda: _temperature(setting, tokens, width, draws),
    }
    for name in setting.steps(list(parts)):
        found[name] = parts[name]()
    return found


def matrices(kind: str, query: Tensor, key: Tensor) -> Tensor:
    """P of softmax attention, or of LLN attention matched by a criterion: ``[draws, N, N]``."""
    query, key = query[0], key[0]
    if kind == "softmax":
        return (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)
    alpha, beta = match_moments(query[None], key[None], criterion=kind)
    return log_kernel(alpha[0] * query, beta[0] * key).softmax(-1)


def log_kernel(exponent_q: Tensor, exponent_k: Tensor) -> Tensor:
    """Log ⟨e^{αq}, e^{βk}⟩ of every pair; the exponents here are far from overflow in float64."""
    return (exponent_q.exp() @ exponent_k.exp().mT).log()


def _theorem_3_3(setting: Setting, tokens: int, width: int, draws: int) -> list[Results]:
    rows = []
    unit = setting.gaussians(draws, tokens, width)
    for p in (0.25, 1.0, 4.0, 16.0):
        for kind in _KINDS:
            own = matrices(kind, *(unit * p**0.25))
            check = theory.theorem_3_3(own)
            ratio = (check.right / check.left).tolist()
            rows.append(
                {
                    "attention": kind,
                    "score_variance": p,
                    "second_eigenvalue": check.left.median().item(),
                    "first_singular_value": check.right.median().item(),
                    "ratio": median(ratio),
                    "departure_from_normality": theory.departure_from_normality(own)
                    .median()
                    .item(),
                    "equality_holds": bool(check.holds.any()),
                    "bound_holds": bool(theory.spectral_bound(own).holds.all()),
                }
            )
    return rows


def _shape(setting: Setting, tokens: int, width: int, draws: int) -> list[Results]:
    """Skew inside a row, and the share of the variance between columns (popular keys)."""
    rows = []
    unit = setting.gaussians(draws, tokens, width, seed=1)
    for p in (0.25, 1.0, 4.0):
        for kind in _KINDS:
            logs = matrices(kind, *(unit * p**0.25)).log()
            centred = logs - logs.mean(-1, keepdim=True)
            spread = centred.square().mean(-1)
            skew = (centred**3).mean(-1) / spread**1.5
            # A column's mean over N rows also contains 1/N of the variance within rows.
            column = centred.mean(-2).square().mean(-1)
            share = (column / spread.mean(-1) - 1 / tokens).clamp_min(0)
            rows.append(
                {
                    "attention": kind,
                    "score_variance": p,
                    "skew_in_a_row": skew.mean().item(),
                    "column_share_of_variance": share.mean().item(),
                }
            )
    return rows


def _equation_32(setting: Setting, tokens: int, width: int, draws: int) -> list[Results]:
    rows = []
    query, key = setting.gaussians(draws, tokens, width, seed=2)[:, 0]
    for s in (1.0, 1.5, 1.9, 2.3, 3.0, 3.8):
        kernel = log_kernel(s * query, s * key)
        denominator = kernel.logsumexp(-1)
        # Over rows the numerator and the denominator are correlated: they share the query.
        numerator = kernel.flatten(1).var(-1, correction=0)
        spread = denominator.var(-1, correction=0)
        together = kernel.mean(-1) - kernel.mean((-2, -1))[:, None]
        covariance = (together * (denominator - denominator.mean(-1, keepdim=True))).mean(-1)
        measured = kernel.log_softmax(-1).flatten(1).var(-1, correction=0)
        rows.append(
            {
                "s": s,
                "sum_variance": 2 * s * s,
                "numerator": numerator.mean().item(),
                "denominator": spread.mean().item(),
                "covariance": covariance.mean().item(),
                "equation_32": theory.lln_variance(numerator, spread).mean().item(),
                "equation_33": theory.broad_variance(2 * s * s),
                "fenton": theory.lln_variance(
                    theory.fenton_variance(2 * s * s, width),
                    theory.fenton_variance(2 * s * s, tokens),
                ),
                "measured": measured.mean().item(),
            }
        )
    return rows


def _proposition_3_1(setting: Setting, width: int) -> list[Results]:
    rows = []
    for tokens in (64, 128) if setting.quick else (128, 512, 2048):
        unit = setting.gaussians(2, tokens, width, seed=3)
        for multiple in (0.35, 0.7, 1.0, 1.4):
            p = multiple * math.log(tokens)
            query, key = (unit * p**0.25)[:, 0]
            logs = (query @ key.mT / math.sqrt(width)).log_softmax(-1)
            predicted = theory.proposition_3_1(p, tokens)
            rows.append(
                {
                    "tokens": tokens,
                    "score_variance_over_ln_n": multiple,
                    "score_variance": p,
                    "measured": logs.mean().item(),
                    "predicted": float(predicted.mean),
                    "error": logs.mean().item() - float(predicted.mean),
                }
            )
    return rows


def _fenton(setting: Setting, terms: int) -> list[Results]:
    draws = 1 << (12 if setting.quick else 17)
    rows = []
    for variance in _FENTON:
        measured = theory.sample_sum_variance(variance, terms, draws=draws, device=setting.device)
        predicted = theory.fenton_variance(variance, terms)
        rows.append(
            {
                "variance": variance,
                "terms": terms,
                "measured": measured,
                "predicted": predicted,
                "ratio": predicted / measured,
            }
        )
    return rows


def _narrow(setting: Setting, terms: int) -> Results:
    variance = 0.01
    generator = torch.Generator().manual_seed(4)
    shape = (1 << 14, terms)
    sums = (
        (variance**0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)).exp().sum(-1)
    )
    return {
        "variance": variance,
        "terms": terms,
        "equation_27": terms * variance,
        "of_the_sum": sums.var(correction=0).item(),
        "of_its_logarithm": sums.log().var(correction=0).item(),
        "narrow_limit": theory.narrow_sum_variance(variance, terms),
    }


def _slope(setting: Setting, tokens: int, width: int) -> Results:
    matrix = matrices("softmax", *setting.gaussians(1, tokens, width, seed=5))
    step = 1e-5
    hot, cold = (of_matrix.entropy(theory.at_temperature(matrix, 1 + t)) for t in (step, -step))
    corrected = theory.entropy_slope(matrix).item()
    return {
        "finite_difference": ((hot - cold) / (2 * step)).item(),
        "as_printed": corrected * math.log(2),
        "with_the_factor": corrected,
    }


def _temperature(setting: Setting, tokens: int, width: int, draws: int) -> list[Results]:
    """Eq. (5) and (11) against 1/√(variance of log P inside a row)."""
    rows = []
    unit = setting.gaussians(draws, tokens, width, seed=6)
    for p in (0.25, 1.0, 4.0, 16.0):
        query, key = unit * p**0.25
        spread = matched_spread(torch.tensor(p, dtype=torch.float64), width, tokens, "variance")
        given = {"kind": "lln", "alpha": spread.item() / p**0.25, "beta": spread.item() / p**0.25}
        rows.append(
            {
                "score_variance": p,
                "softmax_equation_5": _mean(instruments.temperature(query, key)),
                "softmax_measured": _mean(instruments.temperature(query, key, measured=True)),
                "lln_equation_11": _mean(instruments.temperature(query, key, **given)),
                "lln_measured": _mean(instruments.temperature(query, key, measured=True, **given)),
            }
        )
    return rows


def _mean(values: Tensor) -> float:
    return values.mean().item()


def draw(figure: Figure, results: Results) -> None:
    """Left: Theorem 3.3; right: the variance of LLN's log P against its equations."""
    left, right = figure.subplots(1, 2)
    for kind in _KINDS:
        own = [row for row in results["theorem_3_3"] if row["attention"] == kind]
        look = LOOKS[kind] | {"linestyle": "", "marker": LOOKS[kind].get("marker", "*")}
        left.plot(
            [row["second_eigenvalue"] for row in own],
            [row["first_singular_value"] for row in own],
            label=NAMES[kind],
            **look,
        )
    line = [row["second_eigenvalue"] for row in results["theorem_3_3"]]
    ends = [min(line), max(line)]
    left.plot(ends, ends, "k--", linewidth=1, label="Theorem 3.3: equal")
    left.set(xscale="log", yscale="log", xlabel=r"$|\lambda_2|$", ylabel=r"$\sigma_1(\bar P)$")
    left.legend()
    plain_ticks(left)
    title(left, f"(a) d = {results['head_width']}, N = {results['tokens']}, p = 0.25 to 16")
    rows = results["equation_32"]
    x = [row["sum_variance"] for row in rows]
    right.plot(x, [row["measured"] for row in rows], "o", color="#000000", label="measured")
    for name, label, look in (
        ("equation_32", "Eq. (32), measured parts", {"color": "#D55E00", "linestyle": "-"}),
        ("equation_33", "Eq. (33), paper's a and b", {"color": "#E69F00", "linestyle": "-."}),
        ("fenton", "Eq. (28) + (29), Fenton", {"color": "#0072B2", "linestyle": "--"}),
    ):
        right.plot(x, [row[name] for row in rows], label=label, **look)
    right.set(
        xlabel=r"$\tilde\sigma^2 = \alpha^2\sigma_q^2 + \beta^2\sigma_k^2$",
        ylabel="variance of log P of LLN attention",
        ylim=(0, 2.5 * max(row["measured"] for row in rows)),
    )
    right.legend()
    title(right, "(b) whole matrix")
