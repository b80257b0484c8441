"""The bar of steps: a line per new loss away from a terminal, and nothing left behind."""

import math

import pytest

from lln.progress import step_bar


def test_every_new_loss_is_a_line_where_there_is_no_terminal():
    lines = []
    with step_bar(lines.append) as show:
        show("layers", 1, 2, math.nan)
        show("layers", 2, 2, 0.5)
        show("output", 1, 3, 0.5)
        show("output", 2, 3, 0.25)
    assert lines == ["layers, loss 0.5, step 2 of 2", "output, loss 0.25, step 2 of 3"]


def test_an_interrupt_ends_the_bar(capsys):
    def interrupted():
        with step_bar(lambda _: None) as show:
            show("layers", 1, 2, 0.5)
            raise KeyboardInterrupt

    for _ in range(2):
        # A bar that still runs would refuse a second one.
        with pytest.raises(KeyboardInterrupt):
            interrupted()
