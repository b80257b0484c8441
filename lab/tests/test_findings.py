"""Findings: tables are those of the stored cells, and what the text says of them follows."""

import json
import re
import statistics
from collections import Counter

from lab.tests.findings import (
    RESULTS,
    ROOT,
    baseline,
    cells,
    mean,
    methods,
    percent,
    ranked,
    says,
    spread,
    values,
)

from lln_lab.markdown import TABLES

KERNELS = ("elu", "performer", "cosformer", "hedgehog")
RIVALS = (*KERNELS, "nystromformer")
QUERY = "lln_keys@select=query,offset=-1e4"


def test_no_best_row_is_bold_as_the_page_says():
    text = (ROOT / TABLES).read_text("utf-8").split("\n## Experiments")[1]
    assert not re.search(r"\| \*\*[-\d]", text)
    says("nothing is bold")


def test_which_columns_claim_nothing():
    text = (ROOT / TABLES).read_text("utf-8").split("## An earlier recipe")[0]
    lines = re.findall(r"^\*\*Claims nothing\*\*: (.*)$", text, re.MULTILINE)
    named = re.findall(r"(?:^|; )([^(;]*) \(", "; ".join(lines))
    found = Counter(task for part in named for task in part.split(", "))
    glue = ("mnli", "qnli", "qqp", "sst2", "cola", "rte", "mrpc")
    once = {*glue, "cats_dogs", "listops", "pathfinder", "retrieval", "needle-512"}
    # Table 1's, that of the temperatures, and that of the parts.
    assert found == Counter(dict.fromkeys(once, 1) | {"mlm": 3})
    gaps = [mean("lra", task, "diag") - mean("lra", task, "lln_diag") for task in ("text", "image")]
    says(
        "From scratch Tables 1 and 3, ListOps, Pathfinder and Retrieval claim nothing",
        f"on Text and Image the blocks alone are {100 * gaps[0]:.1f} and {100 * gaps[1]:.1f} "
        "points ahead of LLN + Diag",
    )


def test_lln_and_other_linear_attentions():
    score = {
        name: mean("table1", "mlm", name, measure="score") for name in methods("table1", "mlm")
    }
    says("In pre-training LLN + Diag is ahead of the kernelised rivals, by its blocks, and behind")
    assert max(score[name] for name in KERNELS) < score["lln_diag"] < score["diag"]
    assert score["lln_diag"] < score["nystromformer"]
    says(
        "On Image Nyströmformer, cosFormer and the blocks alone are ahead of it by less than a "
        "point"
    )
    order = ranked("lra", "image")
    assert set(order[: order.index("lln_diag")]) == {"nystromformer", "cosformer", "diag"}
    assert mean("lra", "image", order[0]) - mean("lra", "image", "lln_diag") < 0.01
    says("LLN alone is last on Text and next to last on Image")
    assert ranked("lra", "text")[-1] == order[-2] == "lln"
    says("on Text all five rivals are, and in recall Hedgehog is")
    assert set(ranked("lra", "text")[:5]) == set(RIVALS)
    for task in ("recall-512", "repeated-2048"):
        assert mean("distance", task, "hedgehog") > mean("distance", task, "lln_diag")


def test_table_1():
    loss = {name: values("table1", "mlm", name, "loss") for name in methods("table1", "mlm")}
    rest = ("softmax", "lln", *KERNELS)
    plateau = [one for name in rest for one in loss[name]]
    found = [100 * mean("table1", "mlm", name, measure="score") for name in rest]
    alone = [baseline("table1/mlm", "every token by itself", what) for what in ("loss", "score")]
    says(
        f"at {min(plateau):.1f} to {max(plateau):.1f} nats and {min(found):.1f} to "
        f"{max(found):.1f} % of the masked tokens, where *every token by itself* gives "
        f"{alone[0]:.1f} nats and {100 * alone[1]:.1f} %"
    )
    says(f"Exact keys ({min(loss['lln_keys']):.1f} to {max(loss['lln_keys']):.1f} nats)")
    gap = statistics.mean(loss["lln_diag"]) - statistics.mean(loss["diag"])
    says(f"ends {gap:.2f} nats behind the blocks alone")
    left = [
        next(step for step, value in one["curve"] if value < 6.1)
        for one in cells("table1")["mlm", "diag"].values()
    ]
    assert 800 <= min(left) <= max(left) <= 900
    says("Blocks leave it after some 800", f"at {statistics.mean(loss['nystromformer']):.1f} nats")

    def glue(task, method, measure="accuracy"):
        return percent("table1", task, method, measure=measure)

    mnli = {name: glue("mnli", name) for name in methods("table1", "mnli")}
    rivals = sorted(mnli[name] for name in KERNELS)
    says(
        f"Nyströmformer has {mnli['nystromformer']} %, blocks {mnli['diag']}, exact keys "
        f"{mnli['lln_keys']}, LLN + Diag {mnli['lln_diag']}, softmax {mnli['softmax']}, LLN "
        f"{mnli['lln']} and the kernelised rivals {rivals[0]} to {rivals[-1]}"
    )
    for task, said in (("qnli", "QNLI"), ("sst2", "SST-2")):
        order = ranked("table1", task)
        assert order[0] == "nystromformer"
        ends = [percent("table1", task, name, digits=0) for name in (order[-1], order[0])]
        says(f"{said} {'moves ' * (said == 'QNLI')}from {ends[0]} to {ends[1]} %")


def test_glue_beside_constant_answers():
    def ends(task, measure="accuracy"):
        found = [mean("table1", task, name, measure=measure) for name in methods("table1", task)]
        return f"{100 * min(found):.1f} to {100 * max(found):.1f}"

    def constant(task, measure="accuracy"):
        return f"{100 * baseline(f'table1/{task}', 'most frequent class', measure):.1f}"

    says(
        f"QQP's accuracy is {ends('qqp')} % where one answer gives {constant('qqp')}, but its F1 "
        f"is {ends('qqp', 'f1')} % and always saying yes gives {constant('qqp', 'f1')}.",
        f"MRPC: {ends('mrpc')} %, always yes {constant('mrpc')}; F1 {ends('mrpc', 'f1')} %, always "
        f"yes {constant('mrpc', 'f1')}.",
        f"RTE: {ends('rte')} %, one answer {constant('rte')}.",
        f"CoLA: a correlation of {ends('cola', 'matthews')}, one answer 0.",
    )


def test_fine_tunings_that_start_from_other_encoders():
    tuned = [
        one.get("compiled")
        for (task, _), seeds in cells("table1").items()
        if task != "mlm"
        for one in seeds.values()
    ]
    says(f"with `--compile` has {tuned.count(True)} of the {len(tuned)} fine-tunings")


def test_table_3():
    def differs(name):
        gap = mean("table3", "cats_dogs", name) - mean("table3", "cats_dogs", "softmax")
        widest = max(spread("table3", "cats_dogs", one) for one in (name, "softmax"))
        return 0 if abs(gap) <= widest else gap / abs(gap)

    says("Hedgehog, ELU and LLN are above softmax by more than the spread of either row, Linformer")
    ahead = {name for name in methods("table3", "cats_dogs") if differs(name) > 0}
    below = {name for name in methods("table3", "cats_dogs") if differs(name) < 0}
    assert (ahead, below) == ({"hedgehog", "elu", "lln"}, {"linformer"})


def test_long_range_arena():
    text = {name: mean("lra", "text", name) for name in methods("lra", "text")}
    gaps = [
        100 * (text[rival] - text[other])
        for rival in RIVALS
        for other in ("softmax", "diag", "lln_keys")
    ]
    says(f"are {min(gaps):.1f} to {max(gaps):.1f} points ahead of softmax, blocks and exact keys")
    says(f"LLN + Diag is {100 * (text['softmax'] - text['lln_diag']):.1f} points behind softmax")
    image = {name: mean("lra", "image", name) for name in methods("lra", "image")}
    first = [100 * (image[name] - image["softmax"]) for name in ranked("lra", "image")[:4]]
    says(f"LLN + Diag are {min(first):.1f} to {max(first):.1f} points ahead of softmax")
    says(f"Nyströmformer (with a spread of {100 * spread('lra', 'image', 'nystromformer'):.1f})")
    next_two = [100 * (image[name] - image["softmax"]) for name in ("hedgehog", "elu")]
    says(f"ELU and Hedgehog are {next_two[0]:.1f} to {next_two[1]:.1f} ahead")
    assert max(image["lln"], image["performer"]) < image["softmax"]
    first = baseline("lra/listops", "outermost operator")
    says(f"the outermost operator alone, which gives {100 * first:.0f} %")
    for name in methods("lra", "listops"):
        assert mean("lra", "listops", name) - first < 0.005
    says(f"is right for {100 * baseline('lra/retrieval', 'byte counts'):.1f} % of the test pairs")
    found = [mean("lra", "retrieval", name) for name in methods("lra", "retrieval")]
    assert max(found) < baseline("lra/retrieval", "byte counts")
    says(f"{100 * min(found):.0f} to {100 * max(found):.0f} %, with spreads of 0.4 to 2.4")


def test_recall_and_needle():
    def ends(task, name):
        found = [100 * one for one in values("distance", task, name)]
        return f"{min(found):.0f} to {max(found):.0f}"

    both = ("recall-512", "repeated-2048")
    found = {
        name: [percent("distance", task, name, digits=0) for task in both]
        for name in ("lln_keys", "lln", "lln_diag", "hedgehog")
    }
    own = [ends(task, "lln_keys") for task in both]
    says(
        f"{found['lln_keys'][0]} % ({own[0]} over the seeds) and {found['lln_keys'][1]} % "
        f"({own[1]}).",
        f"LLN alone is at {found['lln'][0]} and {found['lln'][1]} %",
        f"LLN + Diag at {found['lln_diag'][0]} and {found['lln_diag'][1]} %",
        f"Hedgehog at {found['hedgehog'][0]} and {found['hedgehog'][1]} %",
        f"({ends(both[0], QUERY)} % at 512 tokens, {ends(both[1], QUERY)} % at 2,048)",
        f"{found['lln_diag'][1]} to {found['lln_diag'][0]} % against softmax's 95 and more",
        f"{percent('distance', 'needle-512', 'softmax')} % in the mean where 95 are asked",
    )
    for name in ("lln", "elu", "lln_keys", QUERY):
        assert min(values("distance", "needle-512", name)) > 0.999
    assert max(values("distance", "needle-512", "hedgehog")) < 0.9
    for task in both:
        assert mean("distance", task, "softmax") >= 0.95


def test_who_misses_the_needle_has_mostly_found_it():
    def last(name, seed, first):
        curve = cells("distance")["needle-512", name][seed]["curve"]
        found = [value for step, value in curve if step >= first]
        return min(found), max(found)

    found = [last("softmax", 0, 900), last("softmax", 1, 1200)]
    low, high = min(low for low, _ in found), max(high for _, high in found)
    says(f"stay at a loss of {low:.2f} to {high:.2f} nats from step 900 and 1,200 on")
    found = [last("hedgehog", seed, 1200) for seed in (0, 2, 3)]
    low, high = min(low for low, _ in found), max(high for _, high in found)
    says(f"Three of Hedgehog's seeds stay at {low:.2f} to {high:.2f}")


def test_who_was_still_improving():
    def improving(name):
        curves = [one["curve"] for one in cells("distance")["recall-512", name].values()]
        return sum(curve[-6][1] - curve[-1][1] > 0.05 for curve in curves)

    says("exact keys with three seeds and Hedgehog with all five were still improving")
    assert (improving("lln_keys"), improving("hedgehog")) == (3, 5)


def test_costs_of_a_step():
    found = json.loads((RESULTS / "cells/lra/small-costs.json").read_text("utf-8"))["costs"]

    def times(entry, *names):
        own = [row[name][entry] / row["softmax"][entry] for row in found.values() for name in names]
        return f"{min(own):.1f} to {max(own):.1f}"

    says(
        f"LLN {times('milliseconds', 'lln')} times as long, LLN + Diag "
        f"{times('milliseconds', 'lln_diag')}, exact keys {times('milliseconds', 'lln_keys')} and "
        f"Nyströmformer {times('milliseconds', 'nystromformer')}",
        f"need {times('peak_mib', *RIVALS)} times as much",
    )
    for row in found.values():
        for name in ("lln", "lln_diag", "lln_keys", "diag"):
            own, other = row[name]["peak_mib"], row["softmax"]["peak_mib"]
            assert 100 * abs(own - other) <= 4 * other


def test_the_earlier_recipe():
    first = cells("table3", "first_cells")

    def score(name):
        return [one["accuracy"] for one in first["cats_dogs", name].values()]

    says("LLN and Hedgehog are better than softmax here, by more than the spread over seeds")
    for name in ("lln", "hedgehog"):
        gap = statistics.mean(score(name)) - statistics.mean(score("softmax"))
        assert gap > max(statistics.stdev(score(name)), statistics.stdev(score("softmax")))
    text = {
        name: statistics.mean(one["accuracy"] for one in seeds.values())
        for (task, name), seeds in cells("lra", "first_cells").items()
        if task == "text"
    }
    says("Performer, ELU, cosFormer and Hedgehog are ahead of softmax and of LLN")
    ahead = {name for name in text if text[name] > max(text["softmax"], text["lln"], text["diag"])}
    assert {"performer", "elu", "cosformer", "hedgehog"} <= ahead
    ends = {
        name: [one["curve"][-1][1] for one in seeds.values()]
        for (task, name), seeds in cells("lra", "first_cells").items()
        if task == "text"
    }
    low = {name: f"{min(own):.2f}" for name, own in ends.items()}
    high = {name: f"{max(own):.2f}" for name, own in ends.items()}
    says(
        f"Performer, which is ahead, overfits least ({low['performer']}; softmax {low['softmax']} "
        f"to {high['softmax']}, LLN {low['lln']} to {high['lln']})"
    )
    assert max(max(own) for name, own in ends.items() if name != "performer") < min(
        ends["performer"]
    )
    assert max(text, key=lambda name: text[name]) == "performer"
