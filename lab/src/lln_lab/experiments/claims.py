"""Which columns of a table claim nothing, by the gates, and the lines below it that say so."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lln_lab.experiments.cell_table import Baselines
from lln_lab.experiments.experiment import Experiment
from lln_lab.experiments.gate_rules import DEVIATIONS, GATES, LEVEL, Gate
from lln_lab.experiments.methods import Method

SAID = {"<": "below", "<=": "at most", ">=": "at least"}
Cells = Sequence[dict[str, Any]]


def captions(
    experiment: Experiment, scale: str, cells: Cells, baselines: Baselines
) -> list[tuple[str, str]]:
    """Lines below a table: what each is about, and the columns with the reasons."""
    nothing: dict[str, str] = {}
    beside: dict[str, str] = {}
    for task, plan in experiment.plans[scale].items():
        own = [cell for cell in cells if cell["cell"]["task"] == task]
        if not own:
            continue
        gate, known = GATES.get(f"{experiment.name}/{task}"), baselines.get(task, {})
        reason = _below_level(own, known) if gate is None else _not_met(gate, own, known)
        if not reason and plan.starts_from in nothing:
            reason = f"from the encoders of {plan.starts_from}"
        if reason:
            nothing[task] = reason
        elif gate is not None and gate.row not in known and _values("softmax", gate.measure, own):
            # Where the gate asks another row, softmax in every layer may be there too.
            beside[task] = _not_met(gate._replace(row="softmax"), own, known)
    return [
        (label, _listed(found))
        for label, found in (
            ("Claims nothing", nothing),
            (f"Claims nothing beside {_title('softmax')}", beside),
        )
        if any(found.values())
    ]


def _listed(reasons: dict[str, str]) -> str:
    """Tasks with their reason; those that share one stand together."""
    shared: dict[str, list[str]] = {}
    for task, reason in reasons.items():
        if reason:
            shared.setdefault(reason, []).append(task)
    return "; ".join(f"{', '.join(own)} ({reason})" for reason, own in shared.items()) + "."


def _not_met(gate: Gate, cells: Cells, known: Mapping[str, Mapping[str, float]]) -> str:
    """Why a gate is not met; empty if it is. What was not measured does not pass."""
    name, level = _title(gate.row), 1.0
    values = _values(gate.row, gate.measure, cells)
    if not values and gate.row in known:
        values = [known[gate.row][gate.measure]]
    if gate.times:
        if gate.times not in known:
            return f"{gate.times} was not measured"
        level = known[gate.times][gate.measure]
    if not values:
        return f"{name} was not measured"
    if gate.met(statistics.mean(values), level):
        return ""
    found, needed = (_number(one, gate) for one in (statistics.mean(values), gate.needed * level))
    return f"{name} {found}, {SAID[gate.comparison]} {needed} needed"


def _below_level(cells: Cells, known: Mapping[str, Mapping[str, float]]) -> str:
    """Why softmax is not above constant answers; empty if it is, or if none are known."""
    for measure, level in known.get(LEVEL, {}).items():
        values = _values("softmax", measure, cells)
        if len(values) < 2:
            continue
        mean, spread = statistics.mean(values), statistics.stdev(values)
        if mean - DEVIATIONS * spread > level:
            return ""
        return (
            f"{_title('softmax')} {100 * mean:.1f} ± {100 * spread:.1f} %, {LEVEL} "
            f"{100 * level:.1f} %"
        )
    return ""


def _values(method: str, measure: str, cells: Cells) -> list[float]:
    return [one[measure] for one in cells if one["cell"]["method"] == method and measure in one]


def _title(row: str) -> str:
    """Of a method, whose name has no spaces; a baseline is called by its own."""
    return Method.parse(row).title if " " not in row else row


def _number(value: float, gate: Gate) -> str:
    return f"{value:.2f} nats" if gate.measure == "loss" else f"{100 * value:.1f} %"
