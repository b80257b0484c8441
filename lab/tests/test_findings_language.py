"""Findings on masked-language training: temperatures, parts, exact keys; text against cells."""

import json
import re
import statistics
from functools import cache

from lab.tests.findings import RESULTS, behind, cells, mean, methods, says, values

from lln_lab.experiments.cells import read_all


def keys(number, select="query"):
    return f"diag/lln_keys@keys={number},select={select},offset=-1e4"


def test_alpha_and_beta():
    fixed = [name for name in methods("temperature", "mlm") if "fixed" in name]
    losses = [values("temperature", "mlm", name, "loss") for name in fixed]
    best = [min(own) for own in zip(*losses, strict=True)]

    def gap(name):
        own = values("temperature", "mlm", name, "loss")
        found = [one - two for one, two in zip(own, best, strict=True)]
        return min(found), max(found)

    def grid(number):
        return gap(f"lln@statistics=fixed,alpha={number},beta={number}+conv")

    tried = sorted(float(re.search(r"alpha=([\d.]+)", name)[1]) for name in fixed)
    says(f"α = β from {tried[0]:g} to {tried[-1]:g}", "among them the α = β = 4 of the paper")
    assert tried[-1] < 4
    steps = cells("temperature")["mlm", fixed[0]][0]["config"]["recipe"]["steps"]
    says(f"{steps} steps each")
    near = [grid(number) for number in (1.0, 2.5)]
    far = [grid(number) for number in (0.5, 3.0)]
    low, high = min(one for one, _ in near), max(one for _, one in near)
    says(f"1.0 and 2.5 cost {low:.3f} to {high:.3f} nats, the ends (0.5 and 3) ")
    says(f"{min(one for one, _ in far):.3f} to {max(one for _, one in far):.3f}. This is")
    ways = [name for name in methods("temperature", "mlm") if name.startswith("lln")]
    ways = [name for name in ways if name not in fixed]
    assert len(ways) == 6
    says(f"all six ways end at most {max(gap(name)[1] for name in ways):.3f} nats behind")
    low, high = gap("lln@matching=entropy+conv")
    says(f"({-low:.3f} ahead to {high:.3f} behind); matching the variance")
    low, high = gap("lln@matching=variance+conv")
    says(f"matching the variance, the default, ends {low:.3f} to {high:.3f} behind")
    says(f"matching the variance ends {low:.3f} to {high:.3f} nats behind it")
    low, high = gap("softmax+conv")
    says(f"Softmax is {high:.3f} behind to {-low:.3f} nats ahead of that best value")
    low, high = gap("diag+conv")
    says(f"Blocks of softmax alone are {-high:.3f} to {-low:.3f} ahead")
    drops = [
        place
        for place, seeds in cells("temperature").items()
        for one in seeds.values()
        if {value for _, value in one["loss_scale"]} != {65536.0}
    ]
    assert drops == [("mlm", "lln@matching=paper+conv")]


def test_parts():
    def gap(name, other="diag"):
        return behind("parts", "mlm", name, other)

    def both(name, other="diag"):
        low, high = gap(name, other)
        digits = 3 if other != "diag" else 2
        return f"{-low:.{digits}f} ahead to {high:.{digits}f} behind"

    low, high = gap("lln_diag@block_size=64")
    says(f"is worst, {low:.2f} to {high:.2f} nats behind blocks alone")
    low, high = gap("lln_diag@join=ratio")
    says(f"A learned ratio per head is {low:.2f} to {high:.2f} behind")
    joins = {name: f"lln_diag@join={name}" for name in ("gate", "heads")}
    says(*(f"({both(name)})" for name in (*joins.values(), "diag/lln")))
    low, high = gap("diag/lln+conv", "diag+conv")
    says(f"({-low:.3f} nats ahead to {high:.3f} behind), and LLN alone is")
    low, high = gap("lln+conv", "diag+conv")
    says(f"LLN alone is {low:.2f} to {high:.2f} behind.")
    low, high = gap("diag/lln_keys@keys=64,learn_offset=True")
    says(f"ahead of blocks alone with every seed, by {-high:.2f} to {-low:.2f} nats")
    low, high = gap("diag/softmax")
    says(f"Softmax in their place is {-high:.2f} to {-low:.2f} ahead")
    sizes = [
        f"{mean('parts', 'mlm', f'lln_diag@block_size={n}', measure='loss'):.2f}"
        for n in (32, 64, 128)
    ]
    says(f"{sizes[0]} nats with 32 tokens, {sizes[1]} with 64, {sizes[2]} with 128")


def test_when_parts_begin_to_learn():
    def left(name):
        """The first step of every seed below the frequencies of words."""
        return [
            next((step for step, value in one["curve"] if value < 6.1), None)
            for one in cells("parts")["mlm", name].values()
        ]

    assert set(left("diag")) == {840}
    says("Blocks leave the frequencies of words after 850 steps", "learning begins after 150 steps")
    for name in ("diag+conv", "lln+conv", "diag/lln+conv"):
        assert max(left(name)) <= 150
    for name in ("softmax", "lln", "lln_keys@learn_offset=True", "lln_diag@block_size=128"):
        assert left(name) == [None] * 3
    low, high = behind("parts", "mlm", "diag", "diag+conv")
    other = statistics.mean(behind("parts", "mlm", "lln", "lln+conv"))
    says(
        f"more than everything else**: {low:.1f} to {high:.1f} nats for blocks, {other:.1f} for LLN"
    )


def test_exact_keys_by_length():
    def loss(length, name):
        return mean("keys", f"mlm-{length}", name, measure="loss")

    def share(length, name):
        brought = loss(length, "diag") - loss(length, "diag/softmax")
        return f"{100 * (loss(length, 'diag') - loss(length, name)) / brought:.0f}"

    own = [share(length, keys(64)) for length in (512, 2048)]
    few = [share(length, keys(16)) for length in (512, 2048)]
    at_random = share(2048, "diag/lln_keys@keys=64,offset=-1e4+random")
    says(
        f"64 keys bring {own[0]} % of what softmax layers bring over blocks alone at 512 tokens "
        f"and {own[1]} % at 2,048; 16 keys {few[0]} and {few[1]} %.",
        f"Keys that a whole block shares bring {share(2048, keys(64, 'block'))} %, hardly more "
        f"than random ones ({at_random} %).",
        "A convolution of the values (5 tokens) brings more than softmax layers do, to all alike.",
    )
    for length in (512, 2048):
        brought = loss(length, "diag") - loss(length, "diag/softmax")
        for name in ("diag", "diag/softmax", keys(64)):
            assert loss(length, name) - loss(length, f"{name}+conv") > brought


@cache
def from_scratch():
    """Validation loss of every variant of the other harness."""
    found = {}
    for path in sorted((RESULTS / "keys_training").glob("*.json")):
        one = json.loads(path.read_text("utf-8"))
        found.setdefault(one["config"]["variant"], []).append(one["valid_loss"])
    return {name: statistics.mean(own) for name, own in found.items()}


def test_exact_keys_from_scratch():
    loss = from_scratch()
    brought = loss["diag"] - loss["diag/softmax"]
    assert 0.19 < (loss["diag"] - loss["diag/block"]) / brought < 0.21
    sentence = "bring a fifth of what softmax layers bring over blocks alone"
    says(f"{sentence}, and their slots hurt", name="docs/exact_keys.md")
    says(sentence, name="docs/pages.md")
    assert loss["diag/query"] > loss["diag/query+noslots"] + 0.05


def test_pages_from_scratch():
    found = {}
    for one in read_all(RESULTS / "cells", "gates", "gpu"):
        if one["cell"]["task"] == "table1-rope":
            found.setdefault(one["cell"]["method"], []).append(one["loss"])
    assert {len(own) for own in found.values()} == {3}
    loss = {name: statistics.mean(own) for name, own in found.items()}
    says(
        "Pages are level with softmax in their place, and both with softmax everywhere.",
        name="docs/pages.md",
    )
    apart = statistics.stdev(found["softmax"])
    assert abs(loss["window/pages"] - loss["window/softmax"]) < apart / 2
    assert abs(loss["window/pages"] - loss["softmax"]) < 0.05
    assert loss["window"] > loss["window/pages"] + 0.15


def test_when_pages_pay():
    benchmarks = RESULTS.parent / "benchmarks"
    rows = json.loads((benchmarks / "pages-cuda.json").read_text("utf-8"))["rows"]

    def faster(part, tokens, batch=None):
        (row,) = (
            row
            for row in rows
            if (row["part"], row["tokens"]) == (part, tokens)
            and batch in (None, row["batch"])
            and (part == "training" or row["heads"].startswith("32/"))
        )
        name = "forward + backward" if part == "training" else "forward"
        return row["softmax"][name] / row["lln"][name]

    assert faster("training", 4096) < 1 < faster("training", 8192)
    assert faster("prefill", 32768) < 1
    assert faster("decode", 8192, 1) < 1 < faster("decode", 32768, 1)
    says(
        "a training step is faster than with softmax from 8,192 tokens on "
        f"({faster('training', 8192):.1f} times; {faster('training', 65536):.1f} at 65,536), "
        "reading a whole text with 32 heads of 128 somewhere above 32,768 "
        f"({faster('prefill', 131072):.1f} times at 131,072), a token more of 16 texts from 8,192 "
        f"({faster('decode', 8192, 16):.1f} times; {faster('decode', 131072, 16):.1f} at 131,072) "
        "and of one text from 32,768.",
        name="docs/pages.md",
    )
    rows = json.loads((benchmarks / "pages-cpu.json").read_text("utf-8"))["rows"]
    times = {(row["part"], row["tokens"]): row for row in rows}

    def on_cpu(part, tokens):
        row = times[part, tokens]
        return row["softmax"]["forward"] / row["lln"]["forward"]

    assert on_cpu("prefill", 1024) < 1 < on_cpu("prefill", 2048)
    says(
        f"read faster from 2,048 tokens on ({on_cpu('prefill', 8192):.1f} times at 8,192), a token "
        f"more above 2,048 ({on_cpu('decode', 8192):.1f} times at 8,192).",
        name="docs/pages.md",
    )


def test_a_pass_key_is_found():
    rows = json.loads((RESULTS / "needle.json").read_text("utf-8"))["rows"]

    def found(row):
        return [
            [cell[depth]["exact"] for depth in ("0.0", "0.25", "0.5", "0.75", "1.0")]
            for cell in rows[row].values()
        ]

    def whole(row):
        return statistics.mean(one for own in found(row) for one in own)

    says("finds a [pass key]", "as often as before at every depth", name="docs/pages.md")
    assert abs(whole("pages") - whole("softmax")) < 0.03
    # A text or two of the sixteen.
    for own, softmax in zip(found("pages"), found("softmax"), strict=True):
        assert all(one >= other - 0.13 for one, other in zip(own, softmax, strict=True))
    says("with window and sinks alone never, but at both ends.", name="docs/pages.md")
    assert all(not any(own[1:4]) for own in found("window and sinks alone"))
