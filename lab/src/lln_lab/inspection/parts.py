"""Parts of softmax's mass that the report shows, some of them for several numbers of keys or pages.

A head's row of numbers is everywhere: the parts that are always there, then what is chosen, by
number, then what is left, by number.
"""

from __future__ import annotations

from dataclasses import dataclass

from lln.checks.printing import written
from lln_lab.inspection.study import Study

Rows = list[tuple[str, list[float]]]

# The share that counts as enough.
ENOUGH = 0.9
# Heads in a sentence, and lines of a table in the terminal; the page has all.
_MOST_NAMED, _MOST_LINES = 8, 16


@dataclass(frozen=True)
class Parts:
    """What attention would be divided into.

    Attributes:
        always: Parts that are there for any number, by the names of their values.
        chosen: What is chosen: ``"keys"`` or ``"pages"``.
        left: What is left.
        left_value: Name of its values, before the number.
        numbers: Numbers that were tried.
        usual: The one that sentences and maps speak of.
    """

    always: dict[str, str]
    chosen: str
    left: str
    left_value: str
    numbers: tuple[int, ...]
    usual: int

    def rows(self, study: Study) -> Rows:
        """Every head with its numbers; those that leave most at the usual number come first."""
        names = [f"mass.{self.chosen}_{number}" for number in self.numbers]
        names += [f"{self.left_value}_{number}" for number in self.numbers]
        cells = study.cells(*self.always.values(), *names)
        cells.sort(key=lambda cell: -self.left_of(cell[2])[self.numbers.index(self.usual)])
        return [(f"{layer}.{head}", list(values)) for layer, head, values in cells]

    def alone(self, values: list[float]) -> float:
        """What a head has in the parts that are always there."""
        return sum(values[: len(self.always)])

    def left_of(self, values: list[float] | tuple[float, ...]) -> list[float]:
        """What a head leaves, by number."""
        return list(values[-len(self.numbers) :])

    def usual_left(self, values: list[float]) -> float:
        """What a head leaves at the usual number."""
        return self.left_of(values)[self.numbers.index(self.usual)]

    @property
    def columns(self) -> list[str]:
        """What a head's numbers are."""
        return [
            *self.always,
            *(f"{number} {self.chosen}" for number in self.numbers),
            *(f"{self.left} beside {number}" for number in self.numbers),
        ]

    def table(self, rows: Rows, lead: str) -> str:
        """The rows as a table for the terminal."""
        letter, first, count = self.chosen[0].upper(), len(self.always), len(self.numbers)
        head = " head" + "".join(f"{name:>8}" for name in self.always)
        labels = (f"{letter} = {number}, {self.left}" for number in self.numbers)
        lines = [lead, head + "".join(f"{label:>16}" for label in labels)]
        for name, values in rows[:_MOST_LINES]:
            own = "".join(f"{written(value, '.0%'):>8}" for value in values[:first])
            pairs = zip(values[first : first + count], values[first + count :], strict=True)
            cells = (f"{written(have, '.0%'):>9}{written(left, '.0%'):>7}" for have, left in pairs)
            lines.append(f"{name:>5}{own}" + "".join(cells))
        more = len(rows) - _MOST_LINES
        if more > 0:
            where = f"{self.left} at {letter} = {self.usual}"
            lines.append(f"… and {more} heads more with less on {where}; see the page.")
        return "\n".join(lines)

    def short(self, rows: Rows) -> list[tuple[str, float]]:
        """Heads that do not hold enough at the usual number, and what they hold."""
        held = [(name, 1 - self.usual_left(values)) for name, values in rows]
        return [(name, share) for name, share in held if share < ENOUGH]


def name_heads(short: list[tuple[str, float]]) -> str:
    """The first heads with their shares, and how many more there are."""
    named = [f"{name} ({written(held, '.0%')})" for name, held in short[:_MOST_NAMED]]
    left = len(short) - _MOST_NAMED
    return ", ".join(named) + (f" and {left} more" if left > 0 else "")
