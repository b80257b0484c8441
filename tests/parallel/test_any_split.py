"""Any cut of any sequence, with any padding and options, gives what one process gives."""

import random

import pytest
import torch
from tests.parallel.splits import TOGETHER, assert_same, by_one, by_rank, inputs_of, shard_of

import lln
import lln.parallel

CASES = 12


def drawn(kind, seed):
    """A case with everything drawn at random."""
    dice = random.Random(f"{kind} {seed}")
    size = dice.choice([2, 3, 4])
    block = dice.choice([1, 2, 4, 6])
    # Half of the cuts are between blocks, and much of the padding begins with a shard.
    step = block if dice.random() < 0.5 else 1
    lengths = [step * dice.choice([0, 1, 2, 3, 5, 8][: 6 if step < 4 else 4]) for _ in range(size)]
    tokens = sum(lengths)
    case = {"kind": kind, "lengths": lengths, "seed": seed, "width": dice.choice([1, 4])}
    causal = dice.random() < 0.5 and kind != "lln_keys"
    options = {"is_causal": causal}
    case["learn"] = ("alpha", "beta") if causal or dice.random() < 0.5 else ()
    if kind != "lln":
        options["block_size"] = block
        options["scale"] = dice.choice([None, 0.3])
    if kind == "lln_keys":
        options["keys"] = dice.choice([0, 1, 4, 9])
        options["group_size"] = dice.choice([None, 1])
        case["learn"] = (*case["learn"], *(("offset",) if causal or dice.random() < 0.5 else ()))
    if dice.random() < 0.5:
        case["heads"], options["enable_gqa"] = 4, True
    if dice.random() < 0.6:
        places = [dice.randrange(tokens + 1), *(sum(lengths[:rank]) for rank in range(size))]
        starts = [(sample, dice.choice(places)) for sample in (0, 0, 1)]
        case["hidden"] = [(one, at, at + dice.randrange(8)) for one, at in starts]
        case["hidden"] += [(1, 0, dice.choice([0, 3]))]
    case["options"] = options
    return size, case


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= 6)) for seed in range(CASES)],
)
@pytest.mark.parametrize("kind", TOGETHER)
def test_any_split(pool, kind, seed):
    size, case = drawn(kind, seed)
    assert_same(pool.run(by_rank, size, case), by_one(case))


def second_derivatives(attend, tensors, options):
    """Gradients of the squared norm of the gradients: the backward pass differentiated again."""
    sides = [tensors[name].clone().requires_grad_() for name in ("query", "key", "value")]
    out = attend(*sides, **options)
    first = torch.autograd.grad(out.square().sum(), sides, create_graph=True)
    return torch.autograd.grad(sum(one.square().sum() for one in first), sides)


def twice(group, rank, case):
    shard = shard_of(inputs_of(case), case, rank)
    return second_derivatives(TOGETHER[case["kind"]], shard, {**case["options"], "group": group})


@pytest.mark.parametrize(
    ("kind", "causal"),
    [(kind, causal) for kind in TOGETHER for causal in {False, kind != "lln_keys"}],
)
def test_second_derivatives(pool, kind, causal):
    options = {"alpha": 1.5, "beta": 1.5, "is_causal": causal}
    if kind == "lln_keys":
        options |= {"offset": 0.5, "block_size": 4, "keys": 2}
    case = {"kind": kind, "lengths": [5, 0, 6], "options": options}
    alone = getattr(lln, f"{kind}_attention")
    expected = second_derivatives(alone, inputs_of(case), options)
    parts = pool.run(twice, 3, case)
    for side, whole in zip(zip(*parts, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(side, 2), whole, rtol=1e-11, atol=1e-11)
