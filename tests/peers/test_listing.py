"""`lln peers`: the table, the card of one system, and JSON."""

import json

import pytest
from benchmarks.peers import cards_in_full, cards_table
from typer.testing import CliRunner

from lln import peers
from lln.cli import app
from lln.errors import InvalidInputError
from lln.peers import listing


def run(*words):
    done = CliRunner().invoke(app, ["peers", *words], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_table_has_every_system_once():
    heads, lines = listing.table()
    assert sorted(line[0] for line in lines) == sorted(peers.available())
    assert {len(line) for line in lines} == {len(heads)}
    output = run()
    for line in lines:
        assert line[0] in output
        assert line[-1] in output
    assert "12 heads" in output


@pytest.mark.parametrize("name", peers.available())
def test_card_says_everything(name):
    output, card = " ".join(run(name).split()), peers.card(name)
    facts = (card.title, card.equation, card.citation, card.complexity, card.oracle)
    for fact in (*facts, card.departures, card.random):
        assert " ".join(fact.split()) in output
    for option in peers.options_of(name):
        assert f"{option.name}={option.default!r}: {' '.join(option.text.split())}" in output


def test_json_is_the_card(tmp_path):
    found = json.loads(run("elu", "--json"))
    assert found["equation"] == peers.card("elu").equation
    assert found["options"]["diagonal"]["default"] == 0
    assert found["parameters_relative"] == 1.0
    every = json.loads(run("--json"))
    assert [one["name"] for one in every] == listing.in_order()
    assert every[listing.in_order().index("elu")] == found


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_unknown_names_get_the_known_ones(more):
    with pytest.raises(InvalidInputError, match="softmax"):
        run("sofmax", *more)
    with pytest.raises(InvalidInputError, match="nothing to remember"):
        run("compressive", *more)


def test_help_teaches():
    output = " ".join(run("--help").split())
    for word in ("core", "mixer", "block", "row-stochastic", "lln bench peers"):
        assert word in output


def test_page_has_every_system():
    table, full = cards_table(), cards_in_full()
    for name in peers.available():
        assert f"(#{name})" in table
        assert f'<a id="{name}"></a>' in full
        assert peers.card(name).equation in full
    for line in table.splitlines()[2:-2]:
        # A bar inside a cell would break the table.
        assert line.count("|") == len(listing.HEADS) + 1
