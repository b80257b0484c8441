"""The search for keys, on made-up models whose best choice is known."""

import itertools

from lln_lab.conversion.key_budget import MOST_RUNS, Trials, choose_budget

LADDER = (0, 16, 32, 64, 128, 256)


def price(layer, keys):
    return 10_000.0 if keys is None else 100.0 + keys


def model(weights, floor=0.0):
    """Damage of layers that falls with keys, and the quality of a model that adds it up."""
    damage = [{keys: floor + (1 - floor) / (1 + keys / 16) for keys in LADDER} for _ in weights]

    def run(choice):
        lost = (
            weight * of_layer[keys]
            for weight, of_layer, keys in zip(weights, damage, choice, strict=True)
            if keys is not None
        )
        return 1 - sum(lost)

    return damage, run


def cost(choice):
    return sum(price(layer, keys) for layer, keys in enumerate(choice))


def test_keys_go_where_they_help_and_little_is_wasted():
    weights = (0.001, 0.02, 0.1, 0.001)
    damage, run = model(weights)
    trials = Trials(run)
    found = choose_budget(damage, price, trials, 0.98)
    assert run(found) >= 0.98
    assert None not in found
    assert found[2] > found[1] >= found[0]
    best = min(
        (choice for choice in itertools.product(LADDER, repeat=4) if run(choice) >= 0.98), key=cost
    )
    assert cost(found) <= 1.25 * cost(best)
    assert len(trials.known) <= MOST_RUNS


def test_no_keys_if_none_are_needed():
    damage, run = model((0.001, 0.001))
    assert choose_budget(damage, price, Trials(run), 0.9) == (0, 0)


def test_softmax_is_the_last_resort_and_only_where_it_is_needed():
    damage, run = model((0.001, 0.2, 0.001), floor=0.5)
    found = choose_budget(damage, price, Trials(run), 0.99)
    assert found == (0, None, 0)


def test_all_stay_softmax_if_nothing_else_will_do():
    damage, run = model((1.0, 1.0), floor=0.9)
    assert choose_budget(damage, price, Trials(run), 0.999) == (None, None)


def test_deep_models_run_as_seldom():
    told = []
    damage, run = model([0.002] * 48)
    trials = Trials(run, told=told.append)
    found = choose_budget(damage, price, trials, 0.98)
    assert run(found) >= 0.98
    assert None not in found
    assert len(trials.known) <= MOST_RUNS
    assert told == list(range(1, len(trials.known) + 1))


def test_quality_that_does_not_grow_with_keys_still_ends_at_the_target():
    damage, _ = model([0.1] * 5)

    def run(choice):
        return 0.5 + 0.4 * (hash(choice) % 97) / 97

    found = choose_budget(damage, price, Trials(run), 0.999)
    assert found == (None,) * 5
