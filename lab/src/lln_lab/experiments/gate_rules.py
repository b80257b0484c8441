"""What has to hold before a column of a table says anything about attentions.

A task that softmax has not learned, or that a count of bytes solves, tells nobody apart. The report
writes this under every table whose gate is not met; recipes that shall do better ask the same.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

COMPARISONS = {"<": operator.lt, "<=": operator.le, ">=": operator.ge}


class Gate(NamedTuple):
    """One condition on the mean of one row over its seeds, or on a baseline.

    Attributes:
        row: A method, or the name of a baseline.
        measure: The entry of its results.
        comparison: Of what was measured with what is needed; a key of `COMPARISONS`.
        needed: A number; with `times` a factor.
        times: The baseline that `needed` multiplies, or nothing.
    """

    row: str
    measure: str
    comparison: str
    needed: float
    times: str = ""

    def met(self, found: float, baseline: float = 1.0) -> bool:
        """Whether what was measured is enough; `baseline` is the value of `times`."""
        return COMPARISONS[self.comparison](found, self.needed * baseline)


# Experiment and task → what it needs.
GATES = {
    "table1/mlm": Gate("softmax", "loss", "<", 3.5),
    "table3/cats_dogs": Gate("softmax", "accuracy", ">=", 0.75),
    "lra/listops": Gate("softmax", "accuracy", ">=", 1.5, times="outermost operator"),
    "lra/pathfinder": Gate("softmax", "accuracy", ">=", 0.75),
    "lra/retrieval": Gate("byte counts", "accuracy", "<=", 0.6),
    "distance/recall-512": Gate("softmax", "accuracy", ">=", 0.95),
    "distance/needle-512": Gate("softmax", "accuracy", ">=", 0.95),
    "distance/repeated-2048": Gate("softmax", "accuracy", ">=", 0.95),
    "temperature/mlm": Gate("softmax+conv", "loss", "<", 3.5),
    "parts/mlm": Gate("softmax", "loss", "<", 3.5),
    # Rows of this table alternate with blocks.
    "keys/mlm-512": Gate("diag/softmax", "loss", "<", 3.5),
    "keys/mlm-2048": Gate("diag/softmax", "loss", "<", 3.5),
}
# Where no number is asked for, softmax has to be above this baseline by as many deviations.
LEVEL, DEVIATIONS = "most frequent class", 2
