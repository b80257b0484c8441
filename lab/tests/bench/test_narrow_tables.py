"""The table at the end of a bench on terminals of any width: no number is ever cut."""

import re

import pytest

from lln_lab.bench import terminal_tables as tables
from lln_lab.bench.attention_table import SPARE, table_of
from lln_lab.bench.operations import OPERATIONS

CELLS = {"milliseconds": 1234.567, "units": 25.1, "fewest_units": 4, "floors": 6.27}
CELLS |= {"softmax_ratio": 0.05, "memory_ratio": 1.63, "peak_bytes": 2.6e6}
CELLS |= {"error": 9e-7, "allowed": 1e-5, "milliseconds_quartiles": [1000.0, 1500.0]}


def shown(monkeypatch, capsys, columns, on_terminal=True):
    """The lines of a table of four operations on a terminal of so many columns."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(tables.sys.stdout, "isatty", lambda: on_terminal)
    case = {"backward": True, "batch": 1, "tokens": 16384, "width": 64, "status": "timed"}
    rows = [case | CELLS | {"operation": name} for name in ("sdpa", "lln", "lln_matched")]
    rows.append(case | {"operation": "lln_diag", "status": "out of memory"})
    tables.show_table(*table_of(rows), "A title", SPARE)
    return re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out).splitlines()


@pytest.mark.parametrize("columns", [40, 80, 100, 120, 160])
def test_numbers_are_whole_at_every_width(columns, monkeypatch, capsys):
    lines = shown(monkeypatch, capsys, columns)
    assert "…" not in "".join(lines)
    found = [line for line in lines if OPERATIONS["lln_matched"].label in line]
    assert "~1234.567" in found[0]
    assert "16384" in found[0]
    if columns >= 80:
        assert max(map(len, lines)) <= columns
        assert "0.05×" in found[0], "how it compares with softmax goes last"


def test_what_a_narrow_terminal_does_without_is_named(monkeypatch, capsys):
    assert "error / allowed" in "".join(shown(monkeypatch, capsys, 160)[:4])
    said = " ".join(shown(monkeypatch, capsys, 100)[-2:])
    assert "A wider terminal also shows: units, peak MB, error / allowed." in said


def test_a_pipe_gets_every_column(monkeypatch, capsys):
    lines = shown(monkeypatch, capsys, 80, on_terminal=False)
    assert {"9e-07", "1e-05", "25.1/4", "2.6"} <= set(" ".join(lines).split())
    assert "wider" not in lines[-1]


def test_tables_without_spare_columns_wrap_words_and_cut_none(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(tables.sys.stdout, "isatty", lambda: True)
    tables.show_table(["", "256", "4096"], [["softmax", "12.345", "out of memory"]], "A title")
    text = capsys.readouterr().out
    assert {"softmax", "12.345", "memory"} <= set(text.split())
    tables.show_table(["", "256"], [], "Without lines")
    tables.show_table([], [], "Without columns")
