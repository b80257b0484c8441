"""`lln peers`: the table, the card of one system, and JSON."""

import itertools
import json
import os

import pytest
from benchmarks.peers import cards_in_full, cards_table
from typer.testing import CliRunner

from lln import peers
from lln.cli import app
from lln.errors import InvalidInputError
from lln.peers import listing
from lln.peers.columns import NARROWEST, in_columns


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


def read_columns(output):
    """Cells of the printed table, folded ones joined again."""
    lines = output.splitlines()
    top = next(index for index, line in enumerate(lines) if line.startswith("name "))
    starts = [lines[top].index(word) for word in ("name", "kind", "complexity", "causal")]
    rows = []
    for line in lines[top + 2 : lines.index("", top)]:
        cells = [line[a:b].strip() for a, b in itertools.pairwise([*starts, None])]
        if cells[0]:
            rows.append(cells)
        else:
            assert cells[1] == cells[3] == "", "only the complexity is folded"
            rows[-1][2] += f" {cells[2]}"
    return rows


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("100", 100), ("160", 160), ("", 100)])
def test_table_fits_and_loses_nothing(columns, width, monkeypatch):
    # Without $COLUMNS, and no terminal to ask.
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((0, 0)))
    output = run()
    assert max(map(len, output.splitlines())) <= width
    rows = read_columns(output)
    _, lines = listing.table()
    assert [row[:3] for row in rows] == [line[:3] for line in lines]
    assert [row[3].split(maxsplit=2) for row in rows] == [line[3:] for line in lines]


def test_formulas_are_folded_between_their_terms():
    one = "O(N (l + N/l) d) strided, O(N (l + cN/l) d) fixed"
    cells = [["sparse", one, "1.0"]]
    for width, expected in (
        (90, [one]),
        (50, ["O(N (l + N/l) d) strided,", "O(N (l + cN/l) d) fixed"]),
        # Longer than the column: at a space, somewhere.
        (0, ["O(N (l + N/l) d)", "strided, O(N (l", "+ cN/l) d) fixed"]),
    ):
        top, rest = in_columns(
            ["name", "time-of-it", "size"], cells, folded="time-of-it", width=width
        )
        assert [line[8:].removesuffix("1.0").strip() for line in rest] == expected
        assert [line.split() for line in top] == [["time-"], ["of-"], ["name", "it", "size"]]
        assert top[-1].endswith("size")
        assert rest[0].endswith(" 1.0")
        assert len(rest[0]) == len(top[-1]) <= max(width, 8 + NARROWEST + 6)


@pytest.mark.parametrize("name", peers.available())
def test_card_says_everything(name):
    output, card = " ".join(run(name).split()), peers.card(name)
    facts = (card.title, card.equation, card.citation, card.complexity, card.oracle)
    for fact in (*facts, card.departures, card.random):
        assert " ".join(fact.split()) in output
    only_told = "torch.use_deterministic_algorithms(True)" in output
    assert only_told != card.repeats_on_gpu
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
