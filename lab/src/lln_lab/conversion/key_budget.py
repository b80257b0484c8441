"""Which layers get how many exact keys, so that a model is as good as asked for the least cost.

The damage of a layer with K keys is measured by itself; how much it matters for the whole model is
learned by running the model with only that layer changed. Both together order all steps "this layer
from K to K' keys" by what they mend per cost. A few runs of the model then find how many of these
steps the target needs. Softmax is the last resort, because its cost grows with the square of the
length: layers stay softmax, those with the most damage first, only if all the keys in every layer
do not reach the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# Keys of every layer, in the order that layers run; None = softmax.
Choice = tuple[int | None, ...]

# Runs of the model: the original's and the last one, which proves the conversion, make it 30.
MOST_RUNS = 28

# Models with more layers are not run once for every one of them.
MOST_WEIGHED = 12


@dataclass
class Trials:
    """Runs a model with choices, each once, and not more often than allowed.

    Attributes:
        run: The quality of a choice.
        most: How often the model may run.
        known: Quality of every choice that ran.
        told: Called after every run with how many there were.
    """

    run: Callable[[Choice], float]
    most: int = MOST_RUNS
    told: Callable[[int], object] = lambda runs: None
    known: dict[Choice, float] = field(default_factory=dict)

    def quality(self, choice: Choice) -> float | None:
        """Of a choice; None if it is not known and no run is left. Softmax everywhere is 1."""
        if all(keys is None for keys in choice):
            return 1.0
        if choice not in self.known:
            if len(self.known) >= self.most:
                return None
            self.known[choice] = self.run(choice)
            self.told(len(self.known))
        return self.known[choice]

    def reaches(self, choice: Choice, target: float) -> bool:
        """Whether a choice is known, or found, to be good enough."""
        found = self.quality(choice)
        return found is not None and found >= target


def choose_budget(
    damage: Sequence[dict[int, float]],
    price: Callable[[int, int | None], float],
    trials: Trials,
    target: float,
) -> Choice:
    """The cheapest choice found that reaches a target; softmax everywhere if no other does.

    Args:
        damage: Of every layer by keys: the squared relative error of its output. All have the same
            numbers of keys.
        price: Of a layer with so many keys; more keys cost more.
        trials: To run the model with.
        target: Quality to reach.
    """
    ladder = sorted(damage[0])
    count = len(damage)
    for keys in ladder:
        trials.quality((keys,) * count)
    if not trials.reaches((ladder[0],) * count, target):
        weighted = _weighted(damage, trials, ladder[0])
        kept = _softmax_needed(weighted, trials, target, ladder[-1])
        path = _path(weighted, price, kept)
        _first(path, lambda choice: trials.reaches(choice, target))
        _step_down(weighted, price, trials, target, ladder)
    return _best(price, trials, target, count)


def _best(
    price: Callable[[int, int | None], float], trials: Trials, target: float, count: int
) -> Choice:
    """Of what reached the target, that with the fewest softmax layers, then the cheapest."""

    def cost(choice: Choice) -> tuple[int, float]:
        total = sum(price(layer, keys) for layer, keys in enumerate(choice))
        return choice.count(None), total

    good = [choice for choice, found in trials.known.items() if found >= target]
    return min(good, key=cost, default=(None,) * count)


def _weighted(
    damage: Sequence[dict[int, float]], trials: Trials, fewest: int
) -> list[dict[int, float]]:
    """Damage in loss of the model's quality, where there are few enough layers to find out."""
    count = len(damage)
    if count == 1 or count > MOST_WEIGHED:
        return list(damage)
    found: list[dict[int, float]] = []
    for layer, of_layer in enumerate(damage):
        alone = tuple(fewest if other == layer else None for other in range(count))
        reached = trials.quality(alone)
        if reached is None:
            return list(damage)
        weight = max(1 - reached, 0.0) / max(of_layer[fewest], 1e-30)
        found.append({keys: weight * error for keys, error in of_layer.items()})
    return found


def _softmax_needed(
    damage: Sequence[dict[int, float]], trials: Trials, target: float, most: int
) -> frozenset[int]:
    """The layers that have to stay softmax even if all others have the most keys."""
    order = sorted(range(len(damage)), key=lambda layer: -damage[layer][most])
    states: list[Choice] = [
        tuple(None if layer in order[:number] else most for layer in range(len(damage)))
        for number in range(len(damage) + 1)
    ]
    number = _first(states, lambda choice: trials.reaches(choice, target))
    return frozenset(order[:number])


def _path(
    damage: Sequence[dict[int, float]],
    price: Callable[[int, int | None], float],
    kept: frozenset[int],
) -> list[Choice]:
    """From the fewest keys everywhere to the most, the steps that mend most per cost first."""
    ladder = sorted(damage[0])
    state = [None if layer in kept else ladder[0] for layer in range(len(damage))]
    path: list[Choice] = [tuple(state)]

    def mended_per_cost(step: tuple[int, int, int]) -> float:
        layer, now, more = step
        mended = damage[layer][now] - damage[layer][more]
        return mended / (price(layer, more) - price(layer, now))

    while steps := _steps(state, ladder):
        layer, _, more = max(steps, key=mended_per_cost)
        state[layer] = more
        path.append(tuple(state))
    return path


def _steps(state: Sequence[int | None], ladder: list[int]) -> list[tuple[int, int, int]]:
    """Every layer that can have more keys, with what it has and what it could have."""
    return [
        (layer, now, more)
        for layer, now in enumerate(state)
        if now is not None
        for more in ladder
        if more > now
    ]


def _first(states: Sequence[Choice], is_good: Callable[[Choice], bool]) -> int:
    """The first state that is good, if each is better than those before; the last one counts."""
    low, high = 0, len(states) - 1
    while low < high:
        middle = (low + high) // 2
        if is_good(states[middle]):
            high = middle
        else:
            low = middle + 1
    return high


def _step_down(
    damage: Sequence[dict[int, float]],
    price: Callable[[int, int | None], float],
    trials: Trials,
    target: float,
    ladder: list[int],
) -> None:
    """Try to take keys away from single layers, as long as runs are left."""
    state = _best(price, trials, target, len(damage))
    stuck: set[int] = set()
    while len(trials.known) < trials.most:
        steps: list[tuple[float, int, int]] = []
        for layer, now in enumerate(state):
            if layer in stuck or now == ladder[0]:
                continue
            fewer = ladder[-1] if now is None else ladder[ladder.index(now) - 1]
            lost = damage[layer][fewer] - (0.0 if now is None else damage[layer][now])
            saved = price(layer, now) - price(layer, fewer)
            steps.append((max(lost, 0.0) / max(saved, 1e-30), layer, fewer))
        if not steps:
            return
        _, layer, fewer = min(steps)
        tried = (*state[:layer], fewer, *state[layer + 1 :])
        if trials.reaches(tried, target):
            state = tried
        else:
            stuck.add(layer)
