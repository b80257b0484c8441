"""Tables of the paper's figures and claims, and of what the instruments cost."""

from __future__ import annotations

from typing import Any

from lln.checks.printing import written
from lln_lab.markdown import commit_of, table

ATTENTION = {
    "softmax": "softmax",
    "paper": "LLN, paper's constants",
    "variance": "LLN, variance matched",
    "entropy": "LLN, entropy matched",
    "unmatched": "LLN, α = β = 1",
    "elu": "ELU + 1",
    "relu": "ReLU",
    "quadratic": "quadratic",
}


def made_by(results: dict[str, Any], one_length: bool = True) -> str:
    """Where the numbers come from; tables over several lengths name them in their heads."""
    made = results["made_by"]
    length = f"N = {results['tokens']}, " if one_length else ""
    return (
        f"d = {results['head_width']}, {length}{results['draws']} draws; made by "
        f"`{made['command']}`, torch {made['torch']}, {commit_of(made)}."
    )


def training(results: dict[str, Any]) -> str:
    """Figure 1: where every layer starts and where it ends."""
    rows = []
    for layer in range(results["size"]["layers"]):
        ends = []
        for name in ("temperature", "entropy", "spectral_gap"):
            curve = results[name][layer]
            ends.append(f"{curve[0]:.2f} → {curve[-1]:.2f}")
        rows.append([str(layer + 1), *ends])
    text = table(["layer", "temperature", "entropy, bits", "spectral gap"], rows)
    size, made = results["size"], results["made_by"]
    return (
        f"{text}\n\n{size['layers']} layers, one head of {size['width']}, {size['length']} bytes "
        f"of {results['corpus']} per sequence, {results['batch']} sequences per update, "
        f"{results['steps']:,} updates, seed {results['seed']}; medians over {results['held_out']} "
        f"held-out sequences. Held-out loss {results['held_out_loss'][0]:.2f} → "
        f"{results['held_out_loss'][-1]:.2f} nats per byte, byte frequencies alone "
        f"{results['unigram_loss']:.2f}. Made by `{made['command']}`, torch {made['torch']}, "
        f"{commit_of(made)}."
    )


def distances(results: dict[str, Any]) -> str:
    """Figure 2 as two numbers per kernel."""
    found = results["distance_to_softmax"]
    rows = [
        [ATTENTION[name], f"{own['entropy_bits']:.3f}", f"{own['spectral_gap']:.3f}"]
        for name, own in sorted(found.items(), key=lambda item: item[1]["entropy_bits"])
    ]
    text = table(["attention", "entropy, bits", "spectral gap"], rows)
    ends = results["score_variance"][0], results["score_variance"][-1]
    grid = f"{len(results['score_variance'])} values of p, evenly spaced in ln p on "
    return f"{text}\n\nMean distance to softmax over {grid}{list(ends)}; {made_by(results)}"


def theorem_3_3(results: dict[str, Any]) -> str:
    """Both sides of Theorem 3.3."""
    rows = [
        [
            ATTENTION[row["attention"]],
            f"{row['score_variance']:g}",
            f"{row['second_eigenvalue']:.3f}",
            f"{row['first_singular_value']:.3f}",
            f"{row['ratio']:.1f}",
            f"{row['departure_from_normality']:.2f}",
        ]
        for row in results["theorem_3_3"]
    ]
    head = ["attention", "p", "\\|λ₂\\|", "σ₁(P̄)", "ratio", "departure from normality"]
    return table(head, rows)


def proposition_3_1(results: dict[str, Any]) -> str:
    """Error of the predicted mean by p / ln N."""
    found = results["proposition_3_1_mean"]
    lengths = sorted({row["tokens"] for row in found})
    multiples = sorted({row["score_variance_over_ln_n"] for row in found})
    errors = {(row["tokens"], row["score_variance_over_ln_n"]): row["error"] for row in found}
    rows = [
        [f"{multiple:g}", *(written(errors[tokens, multiple], "+.3f") for tokens in lengths)]
        for multiple in multiples
    ]
    return table(["p / ln N", *(f"N = {tokens}" for tokens in lengths)], rows)


def equation_28(results: dict[str, Any]) -> str:
    """Fenton's variance over the measured one."""
    rows = [
        [
            f"{row['variance']:g}",
            f"{row['measured']:.4f}",
            f"{row['predicted']:.4f}",
            f"{row['ratio']:.2f}",
        ]
        for row in results["equation_28"]
    ]
    return table(["σ̃²", "measured", "Eq. (28)", "ratio"], rows)


def equation_32(results: dict[str, Any]) -> str:
    """Numerator, denominator, their covariance, and what it adds up to."""
    names = ("numerator", "denominator", "covariance", "equation_32", "measured")
    rows = [
        [f"{row['s']:g}", f"{row['sum_variance']:.1f}", *(f"{row[name]:.3f}" for name in names)]
        for row in results["equation_32"]
    ]
    head = ["s", "σ̃²", "numerator", "denominator", "covariance", "Eq. (32)", "measured"]
    return table(head, rows)


def shape(results: dict[str, Any]) -> str:
    """Skew inside a row and the share of popular keys."""
    rows = [
        [
            ATTENTION[row["attention"]],
            f"{row['score_variance']:g}",
            written(row["skew_in_a_row"], "+.2f"),
            f"{100 * row['column_share_of_variance']:.1f} %",
        ]
        for row in results["shape_of_log_p"]
    ]
    return table(["attention", "p", "skew of log P in a row", "variance that is a column's"], rows)


def temperature(results: dict[str, Any]) -> str:
    """Equations (5) and (11) beside the measured temperature."""
    names = ("softmax_equation_5", "softmax_measured", "lln_equation_11", "lln_measured")
    rows = [
        [f"{row['score_variance']:g}", *(f"{row[name]:.3f}" for name in names)]
        for row in results["temperature"]
    ]
    head = ["p", "softmax, Eq. (5)", "measured", "LLN, Eq. (11)", "measured"]
    return table(head, rows)


def small_print(results: dict[str, Any]) -> str:
    """Eq. (27) and the derivative in the proof of Theorem 3.2."""
    narrow, slope = results["equation_27"], results["theorem_3_2_slope"]
    rows = [
        [
            f"Eq. (27), σ̃² = {narrow['variance']:g}, {narrow['terms']} terms",
            f"{narrow['equation_27']:.3g}",
            f"{narrow['of_its_logarithm']:.3g} (the sum itself: {narrow['of_the_sum']:.3g})",
            f"σ̃²/n = {narrow['narrow_limit']:.3g}",
        ],
        [
            "dH/dτ of Theorem 3.2",
            f"{slope['as_printed']:.4f}",
            f"{slope['finite_difference']:.4f}",
            f"with 1/ln 2: {slope['with_the_factor']:.4f}",
        ],
    ]
    return table(["claim", "as printed", "measured", "corrected"], rows)


def costs(results: dict[str, Any]) -> str:
    """Time against dense eigenvalues, and time and memory of a long sequence."""
    gaps = [
        [
            f"`{row['kind']}`",
            f"{1000 * row['seconds']:.0f} ms",
            f"{row['dense_seconds']:.1f} s",
            f"{row['times_faster']:.0f}",
            "< 1e-15" if row["error"] < 1e-15 else f"{row['error']:.0e}",
        ]
        for row in results["gaps"]
    ]
    long = [
        [
            f"`{row['instrument']}`, `{row['kind']}`",
            f"{row['seconds']:.1f} s",
            f"{row['peak_bytes'] / 2**20:.0f} MiB",
        ]
        for row in results["long"]
    ]
    tokens = results["long"][0]["tokens"]
    made = results["environment"]
    return "\n\n".join(
        [
            table(
                ["gap at N = 2,048", "ours", "all eigenvalues", "times faster", "difference"], gaps
            ),
            table([f"one head of {tokens:,} tokens", "time", "peak of the process"], long),
            f"d = 64, one thread of {made['device']}, torch {made['torch']}; importing torch alone "
            f"takes some 230 MiB. Load {made['load_average']:.1f} on {made['processors']} "
            f"processors at the start. Made by `{made['command']}`, {commit_of(made)}.",
        ]
    )
