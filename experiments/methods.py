"""The attentions that experiments compare, by name.

A method is a system of `lln.peers` with options, or two systems whose layers alternate
(``diag/softmax``: diag in even layers). ``+diag`` averages a system with softmax inside blocks,
``+conv`` adds a depthwise convolution of the values: both work for every core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lln import peers
from lln.errors import InvalidInputError

# What every table shows first, in this order; other systems follow by family.
MAIN = ("softmax", "diag", "lln", "lln_diag", "lln_keys")
BRANCHES: dict[str, dict[str, Any]] = {
    "diag": {"diagonal": 64},
    "conv": {"convolution": 5},
}


@dataclass(frozen=True)
class Method:
    """An attention of every layer.

    Attributes:
        name: As it was asked for.
        systems: One system of `lln.peers`, or two that alternate.
        options: Of all of them, as for `lln.peers.build`.
    """

    name: str
    systems: tuple[str, ...]
    options: dict[str, Any]

    @classmethod
    def parse(cls, name: str) -> Method:
        """Read a name.

        Raises:
            InvalidInputError: One sentence on what is unknown.
        """
        base, *branches = name.split("+")
        systems = tuple(base.split("/"))
        for system in systems:
            peers.card(system)
        if len(systems) > 2:
            raise InvalidInputError(f"{name!r}: at most two systems can alternate.")
        unknown = [branch for branch in branches if branch not in BRANCHES]
        if unknown:
            raise InvalidInputError(
                f"{name!r}: +{unknown[0]} is not known; there are {', '.join(BRANCHES)}."
            )
        options = {key: value for one in branches for key, value in BRANCHES[one].items()}
        return cls(name, systems, options)

    @property
    def title(self) -> str:
        """For tables."""
        names = " / ".join(peers.card(system).title for system in self.systems)
        said = {"diag": "+ Diag", "conv": "+ convolution"}
        return " ".join([names, *(said[one] for one in self.name.split("+")[1:])])


def all_methods() -> list[str]:
    """Every system, the main ones first."""
    return [*MAIN, *(name for name in peers.available() if name not in MAIN)]
