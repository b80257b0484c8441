"""ListOps: the value of a nested expression over digits, by the rules of the long range arena.

An example is an expression such as ``[MAX 4 [MIN 2 9 ] 7 ]`` and its label is what it evaluates to,
one of ten digits. Operators are MIN, MAX, MED (the median, rounded down) and SM (the sum modulo
10), each with 2 to 10 arguments. A tree is grown from its root: a node is an operator with
probability 1/4 and a digit otherwise; nodes at the greatest depth are digits. Trees with more than
500 and fewer than 2000 tokens are kept. Three trees in four would be a single digit, so the root
is always an operator here: among the trees that are kept this changes nothing.

Tokens are the operators with their opening bracket, the digits and the closing bracket: 15 ids
after `PAD`. The pipeline behind several published tables loses the closing brackets. Without them
nobody can tell where an operator's arguments end, so the task is not solvable; ``compat=True``
reproduces that. How little it takes to come close to those tables: who reads only the first token,
the operator at the root, and answers its most frequent value is right in 37 % of the examples
(counted on 10,000), about as often as the models there. Values are not uniform; 0 and 9 are the
most frequent with 17 % each.

Trees are grown many at once, level by level: the nodes of one level lie side by side, ordered by
their parents, so that values, lengths and places in the text are a few array operations per level.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from lln_lab.experiments.tasks.task import Examples, Task, padded

OPERATORS = ("MIN", "MAX", "MED", "SM")
FIRST_DIGIT = 1
FIRST_OPERATOR = FIRST_DIGIT + 10
CLOSE = FIRST_OPERATOR + len(OPERATORS)

SHARE_OPERATORS = 0.25
FEWEST_ARGUMENTS, MOST_ARGUMENTS = 2, 10
# Trees that are grown together: enough for arrays to pay, few enough to stay in the cache.
TOGETHER = 512
# Batches in a row without a new tree, after which there are none left.
PATIENCE = 200


class Level(NamedTuple):
    """The nodes of all trees at one depth, those of one parent side by side.

    Attributes:
        tokens: Digit or operator of every node.
        is_operator: Which of them are operators.
        arguments: How many children each operator has, in the order of the operators.
    """

    tokens: np.ndarray
    is_operator: np.ndarray
    arguments: np.ndarray


def grow(rng: np.random.Generator, count: int, max_depth: int) -> list[Level]:
    """Random trees with an operator at the root, as the levels of all of them together."""
    levels, nodes = [], count
    for depth in range(1, max_depth + 1):
        is_operator = rng.random(nodes, dtype=np.float32) < SHARE_OPERATORS
        if depth in (1, max_depth):
            is_operator[:] = depth == 1
        tokens = rng.integers(FIRST_DIGIT, FIRST_OPERATOR, nodes, dtype=np.uint8)
        operators = int(is_operator.sum())
        tokens[is_operator] = rng.integers(FIRST_OPERATOR, CLOSE, operators, dtype=np.uint8)
        arguments = rng.integers(FEWEST_ARGUMENTS, MOST_ARGUMENTS + 1, operators)
        levels.append(Level(tokens, is_operator, arguments))
        nodes = int(arguments.sum())
        if nodes == 0:
            break
    return levels


def apply(operators: np.ndarray, arguments: np.ndarray, digits: np.ndarray) -> np.ndarray:
    """The value of every operator, given the values of the arguments of all of them in a row."""
    first = np.cumsum(arguments) - arguments
    column = np.arange(len(digits)) - np.repeat(first, arguments)
    # Absent arguments are larger than any digit, so that they come last.
    ordered = np.full((len(arguments), MOST_ARGUMENTS), 10, dtype=np.int64)
    ordered[np.repeat(np.arange(len(arguments)), arguments), column] = digits
    ordered.sort(axis=1)

    def at(place: np.ndarray) -> np.ndarray:
        return np.take_along_axis(ordered, place[:, None], axis=1)[:, 0]

    median = (at((arguments - 1) // 2) + at(arguments // 2)) // 2
    total = np.add.reduceat(digits, first) % 10
    return np.choose(operators, [ordered[:, 0], at(arguments - 1), median, total])


def evaluate(levels: list[Level]) -> tuple[list[np.ndarray], np.ndarray]:
    """The number of tokens below every node, level by level, and the value of every tree."""
    lengths: list[np.ndarray] = []
    value = np.empty(0, dtype=np.int64)
    for level in reversed(levels):
        length = np.ones(len(level.tokens), dtype=np.int64)
        mine = level.tokens.astype(np.int64) - FIRST_DIGIT
        if len(level.arguments):
            first = np.cumsum(level.arguments) - level.arguments
            # The operator itself and its closing bracket.
            length[level.is_operator] = 2 + np.add.reduceat(lengths[-1], first)
            operators = mine[level.is_operator] - 10
            mine[level.is_operator] = apply(operators, level.arguments, value)
        lengths.append(length)
        value = mine
    return lengths[::-1], value


def write(levels: list[Level], lengths: list[np.ndarray]) -> np.ndarray:
    """The tokens of all trees in a row."""
    text = np.empty(int(lengths[0].sum()), dtype=np.uint8)
    start = np.cumsum(lengths[0]) - lengths[0]
    for depth, level in enumerate(levels):
        text[start] = level.tokens
        if not len(level.arguments):
            break
        start = start[level.is_operator]
        text[start + lengths[depth][level.is_operator] - 1] = CLOSE
        # Children follow their operator, each after its elder siblings.
        before = np.cumsum(lengths[depth + 1]) - lengths[depth + 1]
        first = np.cumsum(level.arguments) - level.arguments
        start = np.repeat(start + 1 - before[first], level.arguments) + before
    return text


def expressions(
    rng: np.random.Generator, least: int, most: int, max_depth: int
) -> Iterator[tuple[np.ndarray, int] | None]:
    """Expressions of the right length with their values, without end; None after every batch."""
    while True:
        levels = grow(rng, TOGETHER, max_depth)
        lengths, values = evaluate(levels)
        text, ends = write(levels, lengths), np.cumsum(lengths[0])
        for tree in np.flatnonzero((lengths[0] >= least) & (lengths[0] <= most)):
            yield text[ends[tree] - lengths[0][tree] : ends[tree]], int(values[tree])
        yield None


def load(
    train: int = 96_000,
    valid: int = 2_000,
    test: int = 2_000,
    seed: int = 0,
    length: int = 2048,
    *,
    least: int = 501,
    most: int = 1999,
    max_depth: int = 10,
    compat: bool = False,
) -> Task:
    """Generate the task; the same arguments give the same examples.

    Each part has its own stream of random numbers. The test part is made first, then the
    validation part, and no tree is used twice: neither changes when another number of examples is
    asked for to train on.

    Args:
        train: Examples to train on.
        valid: Examples to choose a checkpoint by.
        test: Examples to report.
        seed: Decides all trees.
        length: N, to which examples are padded.
        least: The fewest tokens of a tree, brackets included.
        most: The most tokens of a tree; at most ``length``, so that nothing is cut.
        max_depth: Depth at which only digits grow; the root has depth 1.
        compat: Whether to drop the closing brackets, as the pipeline of published tables does. The
            task is then not solvable.

    Raises:
        ValueError: If the limits allow no tree, or fewer than are asked for.
    """
    if most > length:
        raise ValueError(f"trees of up to {most} tokens do not fit length={length}")
    if not 1 + FEWEST_ARGUMENTS < most >= least or max_depth < 2:
        raise ValueError(f"no tree has {least} to {most} tokens and max_depth={max_depth}")
    seen: set[bytes] = set()
    streams = np.random.SeedSequence(seed).spawn(3)
    counts = {"test": test, "valid": valid, "train": train}
    parts = {}
    for (part, count), stream in zip(counts.items(), streams, strict=True):
        texts, labels, barren = [], [], 0
        found = expressions(np.random.default_rng(stream), least, most, max_depth)
        while len(texts) < count:
            expression = next(found)
            if expression is None:
                barren += 1
                if barren > PATIENCE:
                    raise ValueError(f"found only {len(texts)} of {count} trees for {part}")
                continue
            text, label = expression
            digest = blake2b(text.tobytes(), digest_size=16).digest()
            if digest in seen:
                continue
            seen.add(digest)
            barren = 0
            # A copy, because a view would keep the whole batch.
            texts.append(text[text != CLOSE] if compat else text.copy())
            labels.append(label)
        ids, lengths = padded(texts, length, np.uint8)
        parts[part] = Examples(ids, np.array(labels, dtype=np.uint8), lengths)
    title = f"ListOps, generated: trees of {least} to {most} tokens"
    return Task(
        name="listops-compat" if compat else "listops",
        title=f"{title}, without closing brackets (not solvable)" if compat else title,
        classes=10,
        vocabulary=CLOSE if compat else CLOSE + 1,
        **parts,
    )


def fresh_trees(
    number: int, depths: tuple[int, ...], count: int, length: int, test: bool = False
) -> dict[str, np.ndarray]:
    """A numbered share of an endless set, with as many trees of every depth.

    A tree belongs to the test part or to the others by its hash, so none is in both. Depths come in
    turn; the deepest operator of a tree has depth minus one, its digits the depth.

    Args:
        number: Which share; others hold other draws.
        depths: Which depths.
        count: Trees.
        length: The most tokens of a tree, and to which all are padded.
        test: Of the test part, one hash in eight.

    Returns:
        ``ids`` uint8 ``[count, length]``, ``labels`` and ``depths`` uint8 ``[count]``.
    """
    rng = np.random.default_rng([number, *depths, int(test)])
    found: dict[int, list[tuple[np.ndarray, int]]] = {depth: [] for depth in depths}
    quota = -(-count // len(depths))
    short = set(depths)
    while short:
        # Deep trees of a deep draw are rare: every depth that is short has its turn.
        for limit in sorted(short):
            for expression in expressions(rng, 1 + FEWEST_ARGUMENTS, length, limit):
                if expression is None:
                    break
                text, label = expression
                steps = np.where(text >= FIRST_OPERATOR, 1, 0) - np.where(text == CLOSE, 2, 0)
                depth = int(steps.cumsum().max()) + 1
                if depth != limit or len(found[depth]) == quota:
                    continue
                digest = blake2b(text.tobytes(), digest_size=1).digest()
                if (digest[0] < 32) == test:
                    found[depth].append((text.copy(), label))
            if len(found[limit]) == quota:
                short.discard(limit)
    turns = [(tree, depth) for row in zip(*found.values(), strict=True)
             for tree, depth in zip(row, depths, strict=True)][:count]  # fmt: skip
    ids, _ = padded([text for (text, _), _ in turns], length, np.uint8)
    return {
        "ids": ids,
        "labels": np.array([label for (_, label), _ in turns], np.uint8),
        "depths": np.array([depth for _, depth in turns], np.uint8),
    }
