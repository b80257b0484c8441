"""Whether data from a file have the form that a program expects, and where they do not.

A schema is written with plain values:

- ``str``, ``bool``, ``int``, ``dict``, ``list``: of that type; ``float``: any finite number;
  ``Real``: also NaN and infinity;
- ``None``: nothing; ``object``: anything;
- ``(a, b)``: one of these schemas; ``frozenset``: one of these values;
- ``[a]``: a list of a; ``[a, b]``: a list of exactly these;
- ``{str: a}``: any names, each with an a;
- ``{"name": a, "other?": b}``: these names, those with a question mark may be missing; others are
  allowed.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from lln.checks.names import shown

# Characters of a wrong value, or of the place where it stands, that a message shows.
_LONGEST = 80

_WORDS = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    Real: "a number",
    dict: "a dictionary",
    list: "a list",
    None: "null",
}


def fault(value: Any, schema: Any, place: str = "") -> str | None:
    """Where a value does not fit its schema, in words; None if it does.

    Args:
        value: What was read.
        schema: What is expected, see above.
        place: Where the value stands, for the words; empty = at the top.

    Example:
        >>> fault({"cases": [{"name": 3}]}, {"cases": [{"name": str}]})
        'cases[0].name must be text, got 3'
        >>> fault({"cases": []}, {"cases": [{"name": str}]}) is None
        True
    """
    if isinstance(schema, tuple):
        found = [fault(value, each, place) for each in schema]
        if None in found:
            return None
        # Inside a list or a dictionary, what is wrong there says more than its type.
        kinds = (type(each) if isinstance(each, (list, dict)) else () for each in schema)
        deep = [one for kind, one in zip(kinds, found, strict=True) if isinstance(value, kind)]
        return deep[0] if deep else _wrong(value, _words(schema), place)
    if isinstance(schema, list) and isinstance(value, list):
        return _fault_of_list(value, schema, place)
    if isinstance(schema, dict) and isinstance(value, dict):
        return _fault_of_dict(value, schema, place)
    return None if _fits(value, schema) else _wrong(value, _words(schema), place)


def _fits(value: Any, schema: Any) -> bool:
    """For schemas that do not look inside."""
    if schema is None or schema is object:
        return value is None or schema is object
    if isinstance(schema, frozenset):
        return isinstance(value, str) and value in schema
    if isinstance(schema, (list, dict)):
        return False
    if isinstance(value, bool):
        return schema is bool
    if schema is float:
        return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return isinstance(value, schema)


def _fault_of_list(value: list[Any], schema: list[Any], place: str) -> str | None:
    if len(schema) != 1 and len(schema) != len(value):
        return _wrong(value, f"a list of {len(schema)}", place)
    each = schema * len(value) if len(schema) == 1 else schema
    pairs = enumerate(zip(value, each, strict=True))
    found = (fault(one, want, f"{place}[{index}]") for index, (one, want) in pairs)
    return next(filter(None, found), None)


def _fault_of_dict(value: dict[Any, Any], schema: dict[Any, Any], place: str) -> str | None:
    begin = f"{place}." if place else ""
    if str in schema:
        wanted = dict.fromkeys(value, schema[str])
    else:
        wanted = {name.rstrip("?"): want for name, want in schema.items()}
        needed = (name for name in schema if not name.endswith("?"))
        missing = next((name for name in needed if name not in value), None)
        if missing is not None:
            return f"{begin}{missing} is missing"
    found = (
        fault(value[name], want, f"{begin}{name}") for name, want in wanted.items() if name in value
    )
    return next(filter(None, found), None)


def _words(schema: Any) -> str:
    if isinstance(schema, tuple):
        return " or ".join(_words(each) for each in schema)
    if isinstance(schema, frozenset):
        return " or ".join(map(repr, sorted(schema)))
    if isinstance(schema, (list, dict)):
        return _WORDS[type(schema)]
    return _WORDS[schema]


def _wrong(value: Any, wanted: str, place: str) -> str:
    found = shown(value)
    found = found if len(found) <= _LONGEST else f"{found[:_LONGEST]}…"
    return f"{place[:_LONGEST] or 'its content'} must be {wanted}, got {found}"
