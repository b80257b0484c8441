"""The attentions that experiments compare, by name.

A method is a system of `lln_lab.peers`, or two that alternate (``diag/softmax``: diag in even
layers). ``+diag`` averages a system with softmax inside blocks, ``+conv`` adds a depthwise
convolution of the values: both work for every core. ``+random`` lets exact keys be drawn instead of
chosen, a control; ``+calibrated`` lets LLN measure α and β on the way instead of matching them.
Options of a system follow an @, separated by commas: ``lln_keys@keys=128,group_size=16``,
``diag/lln_keys@keys=32+conv``.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from lln.errors import InvalidInputError
from lln_lab import peers

# What every table shows first, in this order; other systems follow by family.
MAIN = ("softmax", "diag", "lln", "lln_diag", "lln_keys")
# What the paper's large tables compare, unless others are asked for.
COMPARED = (*MAIN, "elu", "performer", "cosformer", "nystromformer", "hedgehog")
BRANCHES: dict[str, dict[str, Any]] = {
    "diag": {"diagonal": 64},
    "conv": {"convolution": 5},
    "random": {},
    "calibrated": {},
}
# Branches in the titles of tables, where they are not called by their names.
SAID = {"diag": "+ Diag", "conv": "+ convolution", "random": "at random"}


@dataclass(frozen=True)
class Method:
    """An attention of every layer.

    Attributes:
        name: As it was asked for.
        systems: One system of `lln_lab.peers`, or two that alternate, each with its options.
        branches: Options of all of them, as for `lln_lab.peers.build`.
        draws_keys: Whether exact keys are drawn at random instead of chosen.
        calibrates: Whether α and β are measured during the training instead of matched.
    """

    name: str
    systems: tuple[tuple[str, dict[str, Any]], ...]
    branches: dict[str, Any]
    draws_keys: bool = False
    calibrates: bool = False

    @classmethod
    def parse(cls, name: str) -> Method:
        """Read a name.

        Raises:
            InvalidInputError: One sentence on what is unknown.
        """
        base, *branches = name.split("+")
        systems = tuple(_read_system(part) for part in base.split("/"))
        if len(systems) > 2:
            raise InvalidInputError(f"{name!r}: at most two systems can alternate.")
        unknown = [branch for branch in branches if branch not in BRANCHES]
        if unknown:
            raise InvalidInputError(
                f"{name!r}: +{unknown[0]} is not known; there are {', '.join(BRANCHES)}."
            )
        draws_keys = "random" in branches
        if draws_keys and all(system != "lln_keys" for system, _ in systems):
            raise InvalidInputError(f"{name!r}: +random draws the keys of lln_keys; it has none.")
        calibrates = "calibrated" in branches
        if calibrates and all(system not in ("lln", "lln_diag") for system, _ in systems):
            raise InvalidInputError(
                f"{name!r}: +calibrated measures α and β of lln and lln_diag; it has neither."
            )
        options = {key: value for one in branches for key, value in BRANCHES[one].items()}
        return cls(name, systems, options, draws_keys, calibrates)

    @property
    def title(self) -> str:
        """For tables."""
        names = " / ".join(_title(system, options) for system, options in self.systems)
        return " ".join([names, *(SAID.get(one, one) for one in self.name.split("+")[1:])])


def _read_system(text: str) -> tuple[str, dict[str, Any]]:
    """``lln_keys@keys=128,group_size=16`` → the system and its options."""
    system, _, given = text.partition("@")
    peers.card(system)
    options = {}
    for word in filter(None, given.split(",")):
        name, equals, value = word.partition("=")
        if not equals:
            raise InvalidInputError(f"{text!r}: an option is written name=value, got {word!r}.")
        options[name] = _value(value)
    return system, options


def _value(text: str) -> Any:
    """A number, True, False or None as such; anything else is a word."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _title(system: str, options: dict[str, Any]) -> str:
    given = ", ".join(f"{name} {value}" for name, value in options.items())
    return peers.card(system).title + (f" ({given})" if given else "")


def all_methods() -> list[str]:
    """Every system, the main ones first."""
    return [*MAIN, *(name for name in peers.available() if name not in MAIN)]
