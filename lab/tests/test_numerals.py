"""Numbers as people read them."""

import math
import re

import pytest
import torch

from lln.checks.printing import written
from lln.instruments.measurements import Measurement, Measurements
from lln_lab.demo.concentration import KERNELS, Concentration
from lln_lab.demo.page import Demo, render_page


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (-0.0, ".1f", "0.0"),
        (-0.004, ".2f", "0.00"),
        (-0.004, "+.2f", "0.00"),
        (0.0, "+.2f", "0.00"),
        (-0.0, ".4g", "0"),
        (-0.0, ".0e", "0e+00"),
        (-0.0004, ".1%", "0.0%"),
        (-0.05, ".1f", "-0.1"),
        (0.05, "+.1f", "+0.1"),
        (-1e-5, ".0e", "-1e-05"),
        (-1234.5, ",.1f", "-1,234.5"),
        (-math.inf, ".2f", "-inf"),
        (math.nan, ".2f", "nan"),
    ],
)
def test_zero_has_no_sign_and_everything_else_keeps_its_own(value, form, text):
    assert written(value, form) == text


def test_tables_of_measurements_and_of_the_demo_write_zero_without_a_sign():
    values = {"spectral_gap": torch.tensor([[-0.0]], dtype=torch.float64)}
    table = Measurements([Measurement("layer", 0, "softmax", 4, 4, values=values)]).table()
    assert table.split()[-1] == "0"
    part = Concentration(score_variances=(1.0,))
    for curves in (part.entropy, part.gap):
        for name in KERNELS:
            curves[name][1.0] = [-1e-17]
    page = render_page(Demo(concentration=part))
    assert "<td>0.00</td>" in page
    assert not re.search(r"[-−]0\.0", page)
