"""The bar of steps: a line per new loss away from a terminal, and nothing left behind."""

import math

import pytest

from lln.integrations.progress import step_bar


def test_every_new_loss_is_a_line_where_there_is_no_terminal():
    lines = []
    with step_bar(lines.append) as show:
        show("layers", 1, 2, math.nan)
        show("layers", 2, 2, 0.5)
        show("output", 1, 3, 0.5)
        show("output", 2, 3, 0.25)
    assert lines == ["layers, loss 0.5, step 2 of 2", "output, loss 0.25, step 2 of 3"]


def test_away_from_a_terminal_nothing_is_drawn(capsys, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with step_bar() as show:
        show("layers", 0, 2)
        show("layers", 2, 2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_on_a_terminal_the_bar_is_drawn_on_stderr_by_one_process(capsys, monkeypatch, rank):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with step_bar() as show:
        show("layers", 0, 2)
        show("layers", 2, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("layers" in err) == (rank != "1")


def test_an_interrupt_ends_the_bar(capsys):
    def interrupted():
        with step_bar(lambda _: None) as show:
            show("layers", 1, 2, 0.5)
            raise KeyboardInterrupt

    for _ in range(2):
        # A bar that still runs would refuse a second one.
        with pytest.raises(KeyboardInterrupt):
            interrupted()
