"""Tools to test attention with: tolerances, inputs, poison, a doctor; for users' tests, too."""

from lln.testing.inputs import LAYOUTS, make_qkv
from lln.testing.poison import poison_empty
from lln.testing.tolerances import assert_close, budget, largest_error, size_of_sum

__all__ = [
    "LAYOUTS",
    "assert_close",
    "budget",
    "largest_error",
    "make_qkv",
    "poison_empty",
    "size_of_sum",
]
