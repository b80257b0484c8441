"""The report: one HTML file without scripts, and its numbers as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lln_lab.inspection.choice import Chosen
from lln_lab.inspection.findings import findings
from lln_lab.inspection.key_needs import KEY_PARTS, is_one_block
from lln_lab.inspection.maps import CONCENTRATION, CROSS, GAUSSIAN, LLN, NORMALITY, draw_maps
from lln_lab.inspection.mass_plots import mass_plots, page_plots
from lln_lab.inspection.page_needs import page_parts
from lln_lab.inspection.parts import Rows
from lln_lab.inspection.plots import lln_plots, shape_plots, theory_plots
from lln_lab.inspection.study import Study, bin_edges
from lln_lab.report.chart import CaptionedChart, inline_svg
from lln_lab.report.json_text import json_text
from lln_lab.report.rendering import render


def study_charts(study: Study, chosen: Sequence[Chosen]) -> dict[str, list[CaptionedChart]]:
    """All charts, by group."""
    return {
        "concentration": draw_maps(study, CONCENTRATION),
        "normality": draw_maps(study, NORMALITY),
        "shapes": [chart for each in chosen for chart in shape_plots(study, each)],
        "theory": [*theory_plots(study), *draw_maps(study, (CROSS,))],
        "gaussian": draw_maps(study, GAUSSIAN),
        "lln": [*draw_maps(study, LLN), *lln_plots(study)],
        "keys": mass_plots(study),
        "pages": page_plots(study),
    }


def render_page(study: Study, chosen: Sequence[Chosen]) -> str:
    """The page with the results so far."""
    environment = dict(study.environment)
    if math.isfinite(study.seconds):
        environment["seconds of measurement"] = f"{study.seconds:.0f}"
    return render(
        "inspection/page.html",
        title=study.model,
        running=len(study.layers) < study.expected_layers and not study.stopped,
        study=study,
        findings=findings(study),
        charts=study_charts(study, chosen),
        inline_svg=inline_svg,
        environment=environment,
        is_nan=math.isnan,
        masses=_masses(study),
    )


def _masses(study: Study) -> dict[str, tuple[list[str], Rows]]:
    """By section, what the numbers of a head's masses are, and the heads."""
    found = {} if is_one_block(study) else {"keys": KEY_PARTS}
    parts = page_parts(study)
    if parts is not None:
        found["pages"] = parts
    return {name: (each.columns, each.rows(study)) for name, each in found.items()}


def render_json(study: Study, chosen: Sequence[Chosen]) -> str:
    """The numbers of the page."""
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
                **({"pages": layer.pages} if layer.pages else {}),
            }
            for layer in study.layers
        ],
        "values": {name: study.grid(name) for name in study.value_names()},
        "chosen_heads": [_chosen_json(study, each) for each in chosen],
    }
    return json_text(content, digits=6)


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
