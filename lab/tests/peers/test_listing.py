"""`lln peers`: the table, the card of one system, and JSON."""

import itertools
import json
import os
import re

import pytest
from lab.tests.commands import app
from lab.tests.peers.contract import SORTS_ALL
from tests.pages import ROOT, needs_pages
from typer.testing import CliRunner

from lln.errors import InvalidInputError
from lln_lab import peers
from lln_lab.cli.peer_commands import FOLDED
from lln_lab.documents.peer_tables import cards_in_full, cards_table
from lln_lab.peers import listing
from lln_lab.peers.columns import in_columns


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
    assert "12 heads" in " ".join(output.split())


def read_columns(output):
    """Headings and cells of the printed table, folded ones joined again."""
    lines = output.splitlines()
    top = next(index for index, line in enumerate(lines) if line.startswith("name "))
    heads = lines[top].split()
    # Numbers end at the right, so the column of them begins at the end of the one before.
    starts = [lines[top].index(head) for head in heads[:-1]]
    starts.append(lines[top].index(heads[-1]) - 3)
    rows = []
    for line in lines[top + 2 : lines.index("", top)]:
        cells = [line[a:b].strip() for a, b in itertools.pairwise([*starts, None])]
        if cells[0]:
            rows.append(cells)
            continue
        for index, (head, cell) in enumerate(zip(heads, cells, strict=True)):
            assert not cell or head in FOLDED, head
            between = "" if rows[-1][index].endswith("-") else " "
            rows[-1][index] += between + cell if cell else ""
    return heads, rows


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("100", 100), ("160", 160), ("", 100)])
def test_table_fits_and_loses_nothing(columns, width, monkeypatch):
    # Without $COLUMNS, and no terminal to ask.
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((0, 0)))
    output = run()
    assert max(map(len, output.splitlines())) <= width
    found_heads, rows = read_columns(output)
    heads, lines = listing.table()
    # A narrow terminal shows all but the oracles, and says so.
    shown = [index for index, head in enumerate(heads) if head != "oracle" or width >= 100]
    assert found_heads == [heads[index].removeprefix("row-") for index in shown]
    assert rows == [[line[index] for index in shown] for line in lines]
    assert ("room for the oracles" in output) == (width < 100)
    for word in ("mask:", "adds:", "14.2 M"):
        assert word in output


def test_table_has_what_each_card_claims():
    heads, lines = listing.table()
    for line in lines:
        cells = dict(zip(heads, line, strict=True))
        card = peers.card(cells["name"])
        assert cells["mask"] == "yes"
        assert cells["oracle"] == "dense form" or cells["oracle"] in card.oracle
    adds = {line[0]: line[-1] for line in lines}
    oracles = {line[0]: line[heads.index("oracle")] for line in lines}
    # 2 H d² in each of two layers; w of every head; nothing.
    assert (adds["hedgehog"], adds["lion_d"], adds["elu"]) == ("+197 k", "+24", "0")
    assert adds["reformer"].startswith("−")
    assert (oracles["performer"], oracles["elu"]) == ("performer-pytorch", "dense form")


def test_a_causal_form_that_later_tokens_move_is_marked():
    heads, lines = listing.table()
    at = heads.index("causal")
    marked = [line[0] for line in lines if line[at] == "yes*"]
    assert marked == list(SORTS_ALL)
    output = " ".join(run().split())
    for name in marked:
        assert f"* {name}: {peers.card(name).causal_limit}." in output


def test_every_library_of_a_card_is_known_to_the_table():
    own = ("dense", "softmax", "the", "Monte-Carlo", "invariance", "its", "all", "compat='fla'")
    for name in peers.available():
        for part in peers.card(name).oracle.split(";"):
            first = part.split()[0].rstrip(",")
            assert first in (*own, *listing.LIBRARIES), (name, first)


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
            ["name", "time-of-it", "size"], cells, folded={"time-of-it": 16}, width=width
        )
        assert [line[8:].removesuffix("1.0").strip() for line in rest] == expected
        assert [line.split() for line in top] == [["time-"], ["of-"], ["name", "it", "size"]]
        assert top[-1].endswith("size")
        assert rest[0].endswith(" 1.0")
        assert len(rest[0]) == len(top[-1]) <= max(width, 8 + 16 + 6)


@pytest.mark.parametrize("name", peers.available())
def test_card_says_everything(name):
    output, card = " ".join(run(name).split()), peers.card(name)
    facts = (card.title, card.equation, card.citation, card.complexity, card.oracle)
    for fact in (*facts, card.departures, card.random, card.causal_limit):
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


@needs_pages
def test_every_page_that_counts_the_systems_has_the_right_number():
    found = {}
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = re.sub(r"<!--.*?-->", "", page.read_text("utf-8"))
        for number in re.findall(r"(\d+)\s+\[?attention\s+systems", text):
            found[page.name, number] = int(number)
    assert {name for name, _ in found} >= {"README.md", "study.md"}
    assert set(found.values()) == {len(peers.available())}, found
    assert f"\n{len(peers.available())} systems. " in run()


def test_page_has_every_system():
    table, full = cards_table(), cards_in_full()
    for name in peers.available():
        assert f"(#{name})" in table
        assert f'<a id="{name}"></a>' in full
        assert peers.card(name).equation in full
    for line in table.splitlines()[2:-2]:
        # A bar inside a cell would break the table.
        assert line.count("|") == len(listing.HEADS) + 1
