"""The report: one HTML file without scripts, and its numbers as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from lln.studies.inspection.choice import Chosen
from lln.studies.inspection.findings import findings
from lln.studies.inspection.maps import CONCENTRATION, CROSS, GAUSSIAN, LLN, NORMALITY, draw_maps
from lln.studies.inspection.plots import lln_plots, shape_plots, theory_plots
from lln.studies.inspection.study import Study, bin_edges
from lln.studies.report.document import html_document, json_document
from lln.studies.report.markup import contents, figure, number, section, table
from lln.studies.report.series import legend

_NORMALITY = """
<p>Proposition 3.1 takes the entries of P to be log-normal: log P normal. Moment matching reproduces
the variance of log P, which tells the whole of P only as far as that holds.</p>
"""
_THEORY = """
<p>If queries and keys were Gaussian, the variance of log P inside a row would be σq²σk², its mean
−ln N − p/2 and the entropy log₂ N − p/(2 ln 2), with p the variance of the scores. Each dot is a
head, dark in the first layer and light in the last; on the dashed line theory is right.</p>
"""
_GAUSSIAN = """
<p>The closed formulas take the entries of queries and keys to be independent and Gaussian. Heavy
tails, token norms that vary and features of unequal spread are where they go wrong.</p>
"""
_LLN = """
<p>For every head, <code>lln.calibrate</code> searches the α and β at which LLN attention, on the
very same queries and keys, is as concentrated as softmax attention is. That says how LLN could
start in the head’s place. The weights themselves differ, and a model has to be trained to use
them.</p>
"""


def render_page(study: Study, chosen: Sequence[Chosen]) -> str:
    """The page as it stands."""
    running = len(study.layers) < study.expected_layers and not study.stopped
    found = findings(study)
    rows = [[escape(name), escape(value)] for name, value in study.environment.items()]
    if math.isfinite(study.seconds):
        rows.append(["seconds of measurement", f"{study.seconds:.0f}"])
    environment = (
        f'<div class="panel">{table([], rows)}</div>'
        '<p class="small" style="margin-top:.9rem">The numbers of this page lie beside it as JSON. '
        "The theory: arXiv 2311.13541.</p>"
    )
    sections = (
        ("concentration", "1. How concentrated is each head?", _concentration(study, found)),
        ("normality", "2. Is log P normal?", _normality(study, chosen, found)),
        ("theory", "3. Measured against theory (Proposition 3.1)", _theory(study, found)),
        ("gaussian", "4. Where do the Gaussian assumptions break?", _gaussian(study, found)),
        ("lln", "5. What would LLN attention do here?", _lln(study, found)),
        ("layers", "Layers", _layers(study)),
        ("environment", "Environment", environment),
    )
    name = escape(study.model)
    body = "".join(
        (
            f"<h1>{name}</h1>",
            f'<p class="lead">{escape(_lead(study))}</p>',
            contents([(ident, title) for ident, title, _ in sections]),
            _notice(study, running),
            _problems(study),
            *(section(ident, title, content) for ident, title, content in sections),
        )
    )
    return html_document(name, body, refresh=running)


def _lead(study: Study) -> str:
    samples = "" if study.samples == 1 else f" in each of {study.samples} sequences (medians)"
    return (
        f"What lln inspect measured in {study.architecture}: {len(study.layers)} attention layers "
        f"of up to {study.heads} heads, {study.tokens} tokens{samples} of {study.text}. Head 1.2 "
        "is head 2 of layer 1; both count from 0."
    )


def _notice(study: Study, running: bool) -> str:
    missing = study.expected_layers - len(study.layers)
    if missing <= 0:
        return ""
    reason = "The run is still going on" if running else "The run was stopped"
    return (
        f'<p class="warn"><b>{reason}.</b> {missing} of {study.expected_layers} layers to go.</p>'
    )


def _problems(study: Study) -> str:
    items = "".join(
        f"<li>Layer {index} (<code>{escape(layer.name)}</code>): {escape(layer.problem)}.</li>"
        for index, layer in enumerate(study.layers)
        if layer.problem
    )
    return f'<div class="warn"><b>Not everything could be measured.</b><ul>{items}</ul></div>' * (
        items != ""
    )


def _finding(found: dict[str, str], name: str) -> str:
    if name not in found:
        return '<p class="warn">No head was measured for this.</p>'
    return f'<p class="finding">{escape(found[name])}</p>'


def _pairs(drawn: Sequence[tuple[str, str]]) -> str:
    figures = "".join(figure(plot, caption) for plot, caption in drawn)
    return f'<div class="pair">{figures}</div>'


def _concentration(study: Study, found: dict[str, str]) -> str:
    return _finding(found, "concentration") + _pairs(draw_maps(study, CONCENTRATION))


def _normality(study: Study, chosen: Sequence[Chosen], found: dict[str, str]) -> str:
    shapes = [pair for each in chosen for pair in shape_plots(study, each)]
    labels = {
        "softmax": "log P of the head",
        "lln": "log P of LLN at its α, β",
        "normal": "normal of the head’s mean and variance",
    }
    detail = ""
    if shapes:
        detail = legend(list(labels), labels, marks=False, filled=("softmax",)) + _pairs(shapes)
    maps = _pairs(draw_maps(study, NORMALITY))
    return _NORMALITY + _finding(found, "normality") + maps + detail


def _theory(study: Study, found: dict[str, str]) -> str:
    drawn = [*theory_plots(study), *draw_maps(study, (CROSS,))]
    return _THEORY + _finding(found, "theory") + _pairs(drawn)


def _gaussian(study: Study, found: dict[str, str]) -> str:
    return _GAUSSIAN + _finding(found, "gaussian") + _pairs(draw_maps(study, GAUSSIAN))


def _lln(study: Study, found: dict[str, str]) -> str:
    drawn = [*draw_maps(study, LLN), *lln_plots(study)]
    return _LLN + _finding(found, "lln") + _pairs(drawn)


def _layers(study: Study) -> str:
    rows = [
        [
            str(index),
            f"<code>{escape(layer.name)}</code>",
            layer.kind + (", causal" if layer.is_causal else ""),
            f"{layer.heads} × {layer.width}",
            f"{layer.queries} × {layer.keys}",
            escape("; ".join(filter(None, (layer.problem, layer.note and f"no LLN: {layer.note}"))))
            or "–",
        ]
        for index, layer in enumerate(study.layers)
    ]
    head = ["layer", "module", "attention", "heads × width", "queries × keys", "remarks"]
    names = sorted({name for layer in study.layers for name in layer.values})
    every = "".join(
        f'<p class="small">{escape(name)}</p>'
        + table(
            ["layer", *map(str, range(study.heads))],
            [
                [str(index), *("–" if math.isnan(v) else number(v, ".4g") for v in row)]
                for index, row in enumerate(study.grid(name))
            ],
        )
        for name in names
    )
    return (
        f'<div class="panel">{table(head, rows)}</div>'
        f"<details><summary>Every value</summary>{every}</details>"
    )


def render_json(study: Study, chosen: Sequence[Chosen]) -> str:
    """The numbers of the page."""
    names = sorted({name for layer in study.layers for name in layer.values})
    content = {
        "model": study.model,
        "architecture": study.architecture,
        "text": study.text,
        "tokens": study.tokens,
        "samples": study.samples,
        "complete": len(study.layers) >= study.expected_layers,
        "seconds": study.seconds,
        "environment": study.environment,
        "findings": findings(study),
        "layers": [
            {
                "name": layer.name,
                "kind": layer.kind,
                "heads": layer.heads,
                "head_width": layer.width,
                "queries": layer.queries,
                "keys": layer.keys,
                "is_causal": layer.is_causal,
                "problem": layer.problem,
                "no_lln_because": layer.note,
            }
            for layer in study.layers
        ],
        "values": {name: study.grid(name) for name in names},
        "chosen_heads": [_chosen_json(study, each) for each in chosen],
    }
    return json_document(content, digits=6)


def _chosen_json(study: Study, each: Chosen) -> dict[str, object]:
    layer = study.layers[each.layer]
    shape = layer.shapes[each.head]
    mean = layer.value("log_normality.mean", each.head)
    variance = layer.value("log_normality.variance", each.head)
    bins = len(shape.softmax_histogram)
    return {
        "layer": each.layer,
        "head": each.head,
        "why": each.why,
        "edges": bin_edges(mean, variance, bins) if bins else [],
        "softmax_histogram": shape.softmax_histogram,
        "lln_histogram": shape.lln_histogram,
        "quantiles": shape.quantiles,
        "normal_quantiles": shape.normal_quantiles,
    }
