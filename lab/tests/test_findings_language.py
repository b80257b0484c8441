"""Findings on masked-language training: temperatures, parts, exact keys; text against cells."""

import json
import re
import statistics
from functools import cache

from lab.tests.findings import RESULTS, behind, cells, mean, methods, says, values


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

    def share(length, name, branch=""):
        diag, softmax = (loss(length, f"{one}{branch}") for one in ("diag", "diag/softmax"))
        return f"{100 * (diag - loss(length, f'{name}{branch}')) / (diag - softmax):.0f}"

    def gap(length, name, branch=""):
        other = f"diag/softmax{branch}"
        return behind("keys", f"mlm-{length}", f"{name}{branch}", other)

    for length in (512, 2048):
        low, high = gap(length, keys(64))
        text = f"64 keys are {low:.3f} to {high:.3f} nats behind softmax layers, 256 keys "
        low, high = gap(length, keys(256))
        says(f"{text}{-low:.3f} ahead to {high:.3f} behind")
    own = [share(512, keys(64)), share(512, keys(64), "+conv"), share(2048, keys(64))]
    says(
        f"64 keys per query bring {own[0]} % of what softmax brings over blocks alone, and "
        f"{own[1]} % where every layer has a convolution of its values. At 2,048 tokens, without "
        f"one, they bring {own[2]} %."
    )
    brought = loss(2048, "diag") - loss(2048, "diag/softmax")
    at_random = share(2048, "diag/lln_keys@keys=64,offset=-1e4+random")
    says(
        f"of the {brought:.2f} nats that softmax layers bring over blocks alone, 64 keys bring "
        f"{own[2]} % if every query chooses its own, {share(2048, keys(64, 'half'))} % if it",
        f"{share(2048, keys(64, 'block'))} % if that chooses all, and {at_random} % if they are",
        f"they keep {share(2048, keys(64), '+conv')} % of what softmax layers bring",
    )
    for length in (512, 2048):
        low, high = gap(length, keys(64), "+conv")
        says(f"{low:.3f} to {high:.3f}")
        assert loss(length, "diag") - loss(length, "diag+conv") > loss(length, "diag") - loss(
            length, "diag/softmax"
        )
    worth = [
        loss(512, name) - loss(512, f"{name}+conv") for name in ("diag", "diag/softmax", keys(64))
    ]
    says(f"brings {min(worth):.2f} to {max(worth):.2f} nats at 512 tokens")
    low, high = behind("keys", "mlm-2048", "diag/diag@shift=32", "diag")
    says(f"At 2,048 they are {-high:.3f} to {-low:.3f} nats better")


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

    def share(name):
        return f"{100 * (loss['diag'] - loss[name]) / brought:.0f}"

    near, slots = (
        loss[name] - loss["diag/softmax"] for name in ("diag/query+noslots", "diag/query")
    )
    says(
        f"come within {near:.2f} nats of softmax layers in the mean: "
        f"{share('diag/query+noslots')} %",
        f"With slots they stay {slots:.2f} away",
    )
    says("Keys chosen at random bring a third, keys chosen by a block's mean query a fifth.")
    assert 0.3 < float(share("diag/random+noslots")) / 100 < 0.36
    assert 0.19 < float(share("diag/block")) / 100 < 0.21


def test_readme_on_training_from_scratch():
    found = [
        mean("keys", f"mlm-{length}", keys(64), measure="loss")
        - mean("keys", f"mlm-{length}", "diag/softmax", measure="loss")
        for length in (512, 2048)
    ]
    other = from_scratch()["diag/query+noslots"] - from_scratch()["diag/softmax"]
    says(
        f"64 keys by query (the predecessor of pages) were {found[0]:.2f} to {other:.2f} nats "
        f"behind softmax in their place at 512 tokens and {found[1]:.2f} at 2,048, in the mean of "
        "three seeds",
        name="README.md",
    )
