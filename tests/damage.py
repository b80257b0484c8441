"""Ways in which files are damaged: by a disk, by a hand, or on purpose."""

import json
import random

import pytest

from lln.errors import LLNError

VALUES = {
    "null": None,
    "true": True,
    "minus one": -1,
    "a fraction": 1.5,
    "infinity": float("inf"),
    "text": "x",
    "a list": [1],
    "a dictionary": {"a": 1},
}
# So many places of a JSON file get every one of these values.
PLACES = 3

CUT = {
    "empty": lambda content: b"",
    "cut at a third": lambda content: content[: len(content) // 3],
    "one byte missing": lambda content: content[:-2],
    "zeros": lambda content: bytes(len(content)),
    "noise": lambda content: random.Random(0).randbytes(len(content)),
}
FOREIGN = {
    name: lambda content, text=text: text
    for name, text in {
        "nested deeply": b"[" * 200_000,
        "nested dictionaries": b'{"a":' * 200_000,
        "a list": b"[]",
        "a number": b"3",
        "null": b"null",
        "infinity": b"Infinity",
        "NaN": b"NaN",
        "too many digits": b"9" * 10_000,
        "half a character": b'"\\ud800"',
        "UTF-16": '{"a": 1}'.encode("utf-16"),
        "not UTF-8": b'{"caf\xe9": 1}',
        "empty dictionary": b"{}",
    }.items()
}
# These may leave what still can be read.
SLIGHT = {
    "a bit": lambda content: _with_bit(content, len(content) // 2),
    "a bit at the start": lambda content: _with_bit(content, 3),
    "twice": lambda content: content * 2,
}
CHANGED = {
    f"{name} at {place}": lambda content, place=place, value=value: _with_value(
        content, place, value
    )
    for place in range(PLACES)
    for name, value in VALUES.items()
}
JSON_FILES = CUT | FOREIGN | SLIGHT | CHANGED
OTHER_FILES = CUT | SLIGHT


def cases(entries):
    """Parameters for every entry point with every damage of its kind of file."""
    return [
        pytest.param(entry, damage, id=f"{entry}: {damage}")
        for entry, damages in entries.items()
        for damage in damages
    ]


def check_refusal(path, damage, read, end=b""):
    """Damage a file for a moment: reading it gives one sentence, or works if little was changed.

    Args:
        path: The file.
        damage: A name in `JSON_FILES` or `OTHER_FILES`.
        read: Reads it.
        end: What follows whatever is there, as at the end of a line.
    """
    content = path.read_bytes()
    path.write_bytes((JSON_FILES | OTHER_FILES)[damage](content) + end)
    try:
        read()
    except LLNError as error:
        said = str(error)
    else:
        assert damage in SLIGHT or damage in CHANGED, "it was read"
        return
    finally:
        path.write_bytes(content)
    assert path.name in said or path.parent.name in said
    assert "\n" not in said
    assert len(said) < 1500
    assert said.endswith(".")
    assert not said.endswith("..")


def _with_bit(content, place):
    return content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]


def _with_value(content, place, value):
    """JSON with another value somewhere."""
    found = json.loads(content)
    places = list(_places(found))
    holder, key = places[place * len(places) // PLACES]
    holder[key] = value
    return json.dumps(found).encode()


def _places(content):
    """Where values stand, from the outside to the inside."""
    waiting = [content]
    while waiting:
        holder = waiting.pop(0)
        for key in holder if isinstance(holder, dict) else range(len(holder)):
            yield holder, key
            if isinstance(holder[key], (dict, list)):
                waiting.append(holder[key])
