"""The results of a study in sentences, for the page, the terminal and the documentation."""

from __future__ import annotations

import math
from statistics import median

from lln.checks.printing import written
from lln_lab.inspection.key_needs import keys_sentence
from lln_lab.inspection.page_needs import pages_sentence
from lln_lab.inspection.study import Study

# Differences below these count as "the same" in the sentences.
NEAR_NORMAL = 0.05
NEAR_ENTROPY = 0.25
NEAR_GAP = 0.1
NEAR_VARIANCE = 0.25


def findings(study: Study) -> dict[str, str]:
    """One or two sentences per section; sections without a measured head have none."""
    parts = {
        "concentration": _concentration(study),
        "normality": _normality(study),
        "theory": _theory(study),
        "gaussian": _gaussian(study),
        "lln": _lln(study),
        "keys": keys_sentence(study),
        "pages": pages_sentence(study),
    }
    return {name: text for name, text in parts.items() if text}


def _concentration(study: Study) -> str:
    cells = study.cells("entropy")
    if not cells:
        return ""
    sharp, flat = (pick(cells, key=lambda cell: cell[2][0]) for pick in (min, max))
    text = (
        f"Entropy runs from {written(sharp[2][0], '.2f')} bits (head {head_name(sharp)}) to "
        f"{written(flat[2][0], '.2f')} (head {head_name(flat)}), median "
        f"{written(median(c[2][0] for c in cells), '.2f')}; even attention "
        f"over {study.tokens} tokens has {math.log2(study.tokens):.2f}."
    )
    gaps = [cell[2][0] for cell in study.cells("spectral_gap")]
    if gaps:
        ends = (written(end, ".2f") for end in (min(gaps), max(gaps)))
        text += f" The spectral gap runs from {' to '.join(ends)}."
    return text


def _normality(study: Study) -> str:
    cells = study.cells("log_normality.ks", "log_normality.skew", "log_normality.kurtosis")
    if not cells:
        return ""
    near = sum(cell[2][0] <= NEAR_NORMAL for cell in cells)
    middle = written(median(cell[2][0] for cell in cells), ".3f")
    right = sum(cell[2][1] > 0 for cell in cells)
    return (
        f"log P is within a Kolmogorov-Smirnov distance of {NEAR_NORMAL:g} of a normal "
        f"distribution in {near} of {len(cells)} heads (median distance {middle}); it leans to "
        f"the right in {right}."
    )


def _theory(study: Study) -> str:
    names = ("theory.variance", "score_variance.within_row", "theory.entropy", "entropy")
    cells = study.cells(*names)
    ratios = [c[2][0] / c[2][1] for c in cells if c[2][1] > 0]
    if not ratios:
        return ""
    near, ratio = sum(abs(each - 1) <= NEAR_VARIANCE for each in ratios), median(ratios)
    close = sum(abs(max(c[2][2], 0.0) - c[2][3]) <= 2 * NEAR_ENTROPY for c in cells)
    return (
        f"σq²σk² alone gives the variance of log P inside a row to {NEAR_VARIANCE:.0%} in {near} "
        f"of {len(cells)} heads (median ratio {ratio:.2f}; the rest is C_cross). The entropy of a "
        f"log-normal P of the measured variance is right to half a bit in {close}."
    )


def _gaussian(study: Study) -> str:
    cells = study.cells("gaussianity.query_kurtosis", "gaussianity.key_kurtosis")
    norms = study.cells("gaussianity.query_norms", "gaussianity.key_norms")
    if not cells or not norms:
        return ""
    heavy = sum(max(cell[2]) > 1 for cell in cells)
    uneven = sum(max(cell[2]) > 2 for cell in norms)
    return (
        f"Entries of queries or keys have an excess kurtosis above 1 in {heavy} of {len(cells)} "
        f"heads, and token norms vary more than twice as much as Gaussian ones in {uneven}."
    )


def _lln(study: Study) -> str:
    cells = study.cells("entropy", "lln.entropy", "lln.alpha", "lln.beta", "lln.distance")
    if not cells:
        return ""
    reached = [c for c in cells if abs(c[2][0] - c[2][1]) <= NEAR_ENTROPY]
    text = (
        f"LLN attention reaches the entropy to {NEAR_ENTROPY:g} bits in {len(reached)} of "
        f"{len(cells)} heads"
    )
    if reached:
        sides = (sorted(c[2][place] for c in reached) for place in (2, 3))
        alpha, beta = (f"{side[0]:.2g} to {side[-1]:.2g}" for side in sides)
        text += f", with α from {alpha} and β from {beta}"
    gaps = study.cells("spectral_gap", "lln.spectral_gap")
    if gaps:
        close = sum(abs(c[2][0] - c[2][1]) <= NEAR_GAP for c in gaps)
        text += f"; its spectral gap is then within {NEAR_GAP:g} in {close}"
    formula = study.cells("entropy", "lln.formula_entropy")
    if formula:
        off = median(abs(c[2][0] - c[2][1]) for c in formula)
        text += f". The closed formula alone misses the entropy by {off:.2f} bits in the median"
    distance = written(median(c[2][4] for c in cells), ".0%")
    text += f". The same concentration is not the same pattern: {distance} of a row's weight"
    text += " lies elsewhere in the median head"
    even = study.cells("lln.even_distance")
    if even:
        text += f" (even attention: {written(median(c[2][0] for c in even), '.0%')})"
    return text + "."


def head_name(cell: tuple[int, int, tuple[float, ...]]) -> str:
    """``layer.head``."""
    return f"{cell[0]}.{cell[1]}"
