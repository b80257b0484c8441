"""The options of a system, read from its signature and docstring."""

import inspect
import re
from dataclasses import dataclass
from typing import Any

from lln_lab.peers.option_checks import keywords_of
from lln_lab.peers.peer import Core
from lln_lab.peers.projected import Projected
from lln_lab.peers.registry import find

_ENTRY = re.compile(r"(\w+):\s*(.*)")


@dataclass(frozen=True)
class Option:
    """One keyword of `lln_lab.peers.build` that belongs to a system.

    Attributes:
        name: The keyword.
        default: What it is when left out.
        text: What its class says of it.
    """

    name: str
    default: Any
    text: str


def options_of(name: str) -> tuple[Option, ...]:
    """What a system can be built with, the branches that any core takes included.

    Example:
        >>> [option.name for option in options_of("elu")]
        ['diagonal', 'convolution']
    """
    system = find(name)
    return _own(system) + (_own(Projected) if issubclass(system, Core) else ())


def _own(system: type) -> tuple[Option, ...]:
    said: dict[str, str] = {}
    # What a class says goes over what its bases say.
    for one in reversed(system.__mro__):
        said |= _arguments(one.__doc__) | _arguments(vars(one).get("__init__", one).__doc__)
    return tuple(
        Option(name, one.default, said.get(name, "")) for name, one in keywords_of(system).items()
    )


def _arguments(documentation: str | None) -> dict[str, str]:
    """What the ``Args:`` of a docstring say, each on one line."""
    found: dict[str, str] = {}
    indent, current = None, ""
    lines = iter(inspect.cleandoc(documentation or "").splitlines())
    for line in lines:
        if line.strip() == "Args:":
            break
    for line in lines:
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        if depth == 0:
            break
        indent = depth if indent is None else indent
        entry = _ENTRY.match(line.strip()) if depth == indent else None
        if entry:
            current, text = entry.groups()
            found[current] = text
        elif current:
            found[current] = f"{found[current]} {line.strip()}".strip()
    return found
