"""Which columns claim nothing: a task that softmax has not learned tells nobody apart."""

import pytest

from lln_lab.experiments.catalogue import EXPERIMENTS
from lln_lab.experiments.claims import captions
from lln_lab.experiments.gate_rules import COMPARISONS, GATES, Gate
from lln_lab.experiments.methods import Method

KNOWN = {"listops": {"outermost operator": {"accuracy": 0.34}}}


def cells(task, method, *values, measure="accuracy"):
    return [{"cell": {"task": task, "method": method}, measure: value} for value in values]


def said(name, found, known=None):
    return captions(EXPERIMENTS[name], "small", found, known or {})


def test_every_gate_is_of_a_task_that_is_run():
    for place, gate in GATES.items():
        name, task = place.split("/")
        assert task in EXPERIMENTS[name].plans["small"]
        assert gate.comparison in COMPARISONS
        if " " not in gate.row:
            assert Method.parse(gate.row).name in EXPERIMENTS[name].methods


@pytest.mark.parametrize(
    ("accuracies", "line"),
    [
        ((0.74, 0.75), "pathfinder (Softmax attention 74.5 %, at least 75.0 % needed)."),
        ((0.74, 0.76), None),
    ],
)
def test_a_task_that_softmax_has_not_learned_claims_nothing(accuracies, line):
    found = cells("pathfinder", "softmax", *accuracies) + cells("pathfinder", "lln", 0.99, 0.99)
    assert said("lra", found) == ([("Claims nothing", line)] if line else [])


def test_a_gate_may_ask_for_more_than_a_baseline_gives():
    reached = cells("listops", "softmax", 0.52, 0.52)
    assert said("lra", reached, KNOWN) == []
    found = said("lra", cells("listops", "softmax", 0.50, 0.50), KNOWN)
    assert found[0][1] == "listops (Softmax attention 50.0 %, at least 51.0 % needed)."


def test_a_task_that_a_baseline_solves_claims_nothing():
    found = cells("retrieval", "softmax", 0.99, 0.99)
    known = {"retrieval": {"byte counts": {"accuracy": 0.6}}}
    assert said("lra", found, known) == []
    known["retrieval"]["byte counts"]["accuracy"] = 0.61
    text = "retrieval (byte counts 61.0 %, at most 60.0 % needed)."
    assert said("lra", found, known) == [("Claims nothing", text)]


def test_what_was_not_measured_does_not_pass():
    assert (
        "Softmax attention was not measured" in said("table3", cells("cats_dogs", "lln", 1))[0][1]
    )
    found = cells("listops", "softmax", 1.0) + cells("retrieval", "softmax", 1.0)
    text = said("lra", found)[0][1]
    assert "outermost operator was not measured" in text
    assert "byte counts was not measured" in text
    assert said("lra", []) == []


def test_softmax_has_to_be_above_constant_answers_by_two_deviations():
    known = {"text": {"most frequent class": {"accuracy": 0.5}}}
    assert said("lra", cells("text", "softmax", 0.58, 0.60, 0.62), known) == []
    found = said("lra", cells("text", "softmax", 0.5, 0.54, 0.58), known)
    assert found[0][1] == "text (Softmax attention 54.0 ± 4.0 %, most frequent class 50.0 %)."


def test_fine_tuning_of_encoders_that_learned_nothing_claims_nothing():
    known = {"sst2": {"most frequent class": {"accuracy": 0.5}}}
    tuned = cells("sst2", "softmax", 0.9, 0.91) + cells("qnli", "softmax", 0.9, 0.91)
    for loss, lines in ((3.4, 0), (6.3, 1)):
        found = said("table1", cells("mlm", "softmax", loss, measure="loss") + tuned, known)
        assert len(found) == lines
    assert found[0][1].endswith("; qnli, sst2 (from the encoders of mlm).")


def test_a_row_of_softmax_that_has_not_learned_is_named_where_another_one_is_asked():
    found = cells("mlm-512", "diag/softmax", 2.9, measure="loss")
    assert said("keys", found) == []
    found += cells("mlm-512", "softmax", 6.3, measure="loss")
    assert said("keys", found) == [
        (
            "Claims nothing beside Softmax attention",
            "mlm-512 (Softmax attention 6.30 nats, below 3.50 nats needed).",
        )
    ]


def test_limits_are_met_or_not_as_they_are_written():
    gate = Gate("softmax", "loss", "<", 3.5)
    assert gate.met(3.4999)
    assert not gate.met(3.5)
    assert gate._replace(comparison="<=").met(3.5)
