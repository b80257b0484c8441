"""Section 1: entropy and spectral gap against the variance of the scores."""

from __future__ import annotations

import math
from statistics import median

from lln.studies.demo.concentration import KERNELS, MAPPED, Concentration, Curves
from lln.studies.demo.state import missing
from lln.studies.report.chart import Axis, Line, line_chart, linear_axis
from lln.studies.report.markup import figure, number, section, swatch, table
from lln.studies.report.picture import colour_bar, matrix_picture
from lln.studies.report.series import LOOKS, legend

_LABELS = {"lln": "LLN, variance-matched (default)", "quadratic": "quadratic, (q·k)²"}

_INTRODUCTION = """
<p>Softmax attention gets sharper as its scores spread out. A linear attention whose weights stay
near even cannot do that, whatever the input says. LLN attention follows through α and β, which
<code>match_moments</code> sets from the spread of the queries and keys.</p>
"""

_REMARK = """
<p>Matching the variance of log P is the paper’s criterion and the default here. It does
<em>not</em> match the entropy: inside a row, LLN’s log P leans to the right where that of softmax
is nearly symmetric, so LLN comes out sharper. <code>matching="entropy"</code> aims at the entropy
itself.</p>
"""


def concentration_headline(part: Concentration) -> str:
    """How far each attention is from softmax attention."""
    distances = "; ".join(
        f"{part.distance(part.entropy, name):.2f} bits of entropy and "
        f"{part.distance(part.gap, name):.3f} of spectral gap for {label}"
        for name, label in (
            ("lln_entropy", "entropy-matched LLN"),
            ("lln", "variance-matched LLN"),
            ("elu", "ELU + 1"),
        )
    )
    return f"Mean distance to softmax attention: {distances}."


def concentration_section(part: Concentration) -> str:
    """The section as HTML."""
    title = "1. Does it concentrate like softmax attention?"
    if not part.has_results:
        return section("concentration", title, _INTRODUCTION + missing(part), part.state.value)
    draws = part.seeds_done()
    setting = f"Gaussian queries and keys, N = {part.tokens}, d = {part.width}; " + (
        "one draw." if draws == 1 else f"median of {draws} draws."
    )
    even = math.log2(part.tokens)
    charts = (
        figure(
            _chart(part, part.entropy, "entropy, bits", even, " bits"),
            "<b>Entropy</b> of a row of P, averaged over the rows. Lower is sharper; "
            f"even attention has log₂ {part.tokens} = {even:g} bits. {setting}",
        ),
        figure(
            _chart(part, part.gap, "spectral gap", 1.0, ""),
            "<b>Spectral gap</b> 1 − |λ₂| of P. Near 1, every token receives nearly the same "
            f"average. {setting}",
        ),
    )
    body = (
        f'{_INTRODUCTION}<p class="finding">{concentration_headline(part)}</p>{_REMARK}'
        f'{legend(list(KERNELS), _LABELS)}<div class="pair">{"".join(charts)}</div>'
        f"{_pictures(part)}{_tables(part)}"
    )
    return section("concentration", title, body, part.state.value)


def _chart(part: Concentration, curves: Curves, label: str, high: float, unit: str) -> str:
    asked = part.score_variances
    ticks = tuple((p, f"{p:g}" if p >= 1 else f"1/{1 / p:g}") for p in asked)
    x = Axis("variance p of the softmax scores", asked[0] / 1.15, asked[-1] * 1.15, ticks, log=True)
    # Softmax is the yardstick: a band on which another line may lie without hiding it.
    order = ("softmax", *reversed(KERNELS[1:]))
    lines = [
        Line(
            name,
            [(p, median(curves[name][p])) for p in part.measured()],
            unit,
            wide=name == "softmax",
        )
        for name in order
    ]
    title = f"{label} against score variance"
    return line_chart(title, x, linear_axis(label, 0, high), lines)


def _pictures(part: Concentration) -> str:
    if not part.maps:
        return ""
    labels = {"lln": "LLN, variance-matched"}
    pictures = "".join(
        f"<div>{matrix_picture(part.maps[name], f'weights of {LOOKS[name].label} attention')}"
        f'<div class="small">{swatch(name, labels.get(name))}</div></div>'
        for name in MAPPED
        if name in part.maps
    )
    caption = (
        f"<b>The same inputs, p = {part.map_variance:g}.</b> Weights of {part.map_size} queries "
        f"(rows) on {part.map_size} of the {part.tokens} keys (columns), as multiples of even "
        "attention, one scale for all. LLN’s columns show: some keys are popular with all queries."
    )
    return figure(f'<div class="four">{pictures}</div>{colour_bar()}', caption, "wide")


def _tables(part: Concentration) -> str:
    rows = [
        [
            swatch(name, _LABELS.get(name)),
            number(part.distance(part.entropy, name), ".2f"),
            number(part.distance(part.gap, name), ".3f"),
        ]
        for name in KERNELS
        if name != "softmax"
    ]
    head = ["mean distance to softmax", "entropy, bits", "spectral gap"]
    every = "".join(
        f'<p class="small">{label}</p>{_values(part, curves, digits)}'
        for label, curves, digits in (
            ("Entropy in bits, by p", part.entropy, 2),
            ("Spectral gap, by p", part.gap, 3),
        )
    )
    return (
        f'<div class="panel narrow">{table(head, rows)}</div>'
        f"<details><summary>Every value</summary>{every}</details>"
    )


def _values(part: Concentration, curves: Curves, digits: int) -> str:
    head = ["p", *(LOOKS[name].label for name in KERNELS)]
    rows = [
        [f"{p:g}", *(number(median(curves[name][p]), f".{digits}f") for name in KERNELS)]
        for p in part.measured()
    ]
    return table(head, rows)
