"""ListOps: a stack machine reads the same values; trees follow the rules; parts share nothing."""

import statistics
from collections import Counter

import numpy as np
import pytest

from lln_lab.experiments.tasks import listops

NAMES = {1 + digit: digit for digit in range(10)} | {11: "MIN", 12: "MAX", 13: "MED", 14: "SM"}
READ = {
    "MIN": min,
    "MAX": max,
    "MED": lambda digits: int(statistics.median(digits)),
    "SM": lambda digits: sum(digits) % 10,
}
SHORT = {"length": 128, "least": 10, "most": 100, "max_depth": 5}


def run(tokens):
    """A stack machine: the value, the greatest depth, and (operator, arguments) of every list."""
    stack, depth, deepest, lists = [], 0, 0, []
    for token in tokens:
        if token == 15:
            arguments = []
            while isinstance(stack[-1], int):
                arguments.append(stack.pop())
            name = stack.pop()
            lists.append((name, len(arguments)))
            stack.append(READ[name](arguments))
            depth -= 1
        else:
            stack.append(NAMES[int(token)])
            deepest = max(deepest, depth + 1)
            depth += isinstance(stack[-1], str)
    (value,) = stack
    assert isinstance(value, int)
    return value, deepest, lists


def tokens_of(examples):
    return [ids[:count] for ids, count in zip(examples.ids, examples.lengths, strict=True)]


@pytest.fixture(scope="module")
def task():
    return listops.load(300, 20, 20, seed=1)


@pytest.fixture(scope="module")
def short():
    return listops.load(2000, 100, 100, seed=2, **SHORT)


def test_the_stack_machine_is_right():
    # [MED [MIN 9 4 ] 7 [SM 8 5 ] 2 ]: the median of 4, 7, 3, 2 is 3.5.
    tokens = [13, 11, 10, 5, 15, 8, 14, 9, 6, 15, 3, 15]
    assert run(tokens) == (3, 3, [("MIN", 2), ("SM", 2), ("MED", 4)])


@pytest.mark.parametrize("kind", ["task", "short"])
def test_labels_are_what_expressions_evaluate_to(kind, request):
    task = request.getfixturevalue(kind)
    for part in (task.train, task.valid, task.test):
        assert [run(tokens)[0] for tokens in tokens_of(part)] == part.labels.tolist()


def test_lengths_depths_and_padding(task, short):
    for some, least, most, deepest in ((task, 501, 1999, 10), (short, 10, 100, 5)):
        part = some.train
        assert part.lengths.min() >= least
        assert part.lengths.max() <= most
        assert max(run(tokens)[1] for tokens in tokens_of(part)) == deepest
        inside = np.arange(part.ids.shape[1]) < part.lengths[:, None]
        assert ((part.ids != 0) == inside).all()
        assert part.ids.max() == 15 < some.vocabulary == 16
    assert task.train.ids.shape == (300, 2048)
    # Not only short ones.
    assert 700 < np.median(task.train.lengths) < 1000


def test_operators_and_numbers_of_arguments_are_uniform(task):
    lists = [found for tokens in tokens_of(task.train) for found in run(tokens)[2]]
    operators = Counter(name for name, _ in lists)
    arguments = Counter(count for _, count in lists)
    assert sorted(operators) == sorted(READ)
    assert sorted(arguments) == list(range(2, 11))
    for count in operators.values():
        assert count / len(lists) == pytest.approx(1 / 4, abs=0.01)
    # Longer trees are kept, which favours many arguments a little.
    for count in arguments.values():
        assert count / len(lists) == pytest.approx(1 / 9, abs=0.015)
    digits = Counter(int(token) for tokens in tokens_of(task.train) for token in tokens)
    every = sum(digits[1 + digit] for digit in range(10))
    for digit in range(10):
        assert digits[1 + digit] / every == pytest.approx(0.1, abs=0.005)


def test_the_operator_at_the_root_alone_gives_a_third_of_the_answers(task):
    roots, labels = task.train.ids[:, 0], task.train.labels
    right = sum(np.bincount(labels[roots == root]).max() for root in range(11, 15))
    assert right / len(labels) == pytest.approx(0.37, abs=0.08)


def test_an_operator_in_four_above_the_greatest_depth():
    levels = listops.grow(np.random.default_rng(0), 500, 6)
    shares = [level.is_operator.mean() for level in levels]
    assert (shares[0], shares[-1]) == (1, 0)
    assert shares[1:-1] == pytest.approx([0.25] * 4, abs=0.03)


def test_the_same_seed_gives_the_same_and_another_other_trees(short):
    again = listops.load(50, 100, 100, seed=2, **SHORT)
    other = listops.load(50, 100, 100, seed=3, **SHORT)
    for part in ("train", "valid", "test"):
        expected = getattr(short, part).first(50)
        found = getattr(again, part).first(50)
        assert (expected.ids == found.ids).all()
        assert (expected.labels == found.labels).all()
        assert (expected.ids != getattr(other, part).ids[:50]).any()


def test_no_tree_is_used_twice():
    # So short that repeated trees are drawn all the time.
    task = listops.load(600, 200, 200, seed=0, length=8, least=4, most=5, max_depth=3)
    texts = [ids.tobytes() for part in (task.train, task.valid, task.test) for ids in part.ids]
    assert len(set(texts)) == len(texts) == 1000


def test_compat_is_the_same_without_closing_brackets(short):
    compat = listops.load(100, 100, 100, seed=2, **SHORT, compat=True)
    assert compat.vocabulary == 15
    whole = tokens_of(short.train)[:100]
    for tokens, without in zip(whole, tokens_of(compat.train), strict=True):
        assert without.tolist() == [token for token in tokens if token != 15]
    assert (compat.train.labels == short.train.labels[:100]).all()
    assert "not solvable" in compat.title


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 100, "most": 101, "least": 1}, "do not fit length=100"),
        ({"least": 20, "most": 10}, "no tree has 20 to 10 tokens"),
        ({"max_depth": 1}, "max_depth=1"),
        ({"least": 4, "most": 4, "max_depth": 2, "train": 401}, "found only 400 of 401"),
    ],
)
def test_impossible_limits_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        listops.load(**{"train": 5, "valid": 0, "test": 0} | options)
