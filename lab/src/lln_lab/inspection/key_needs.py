"""How much of each head's attention its block, chosen keys and slots would hold, in words."""

from __future__ import annotations

from statistics import median

from lln.checks.printing import written
from lln_lab.inspection.head_masses import BLOCK
from lln_lab.inspection.key_masses import KEYS
from lln_lab.inspection.parts import ENOUGH, Parts, Rows, name_heads
from lln_lab.inspection.study import Study

# The number of keys that sentences and maps speak of.
USUAL = 64
KEY_PARTS = Parts({"block": "mass.block"}, "keys", "slots", "mass.rest", KEYS, USUAL)


def is_one_block(study: Study) -> bool:
    """Whether a whole sequence lies in one block, so that nothing is left to choose."""
    return study.tokens <= BLOCK


def mass_rows(study: Study) -> Rows:
    """Every head with the masses of its block and, for each number, of chosen keys and slots."""
    return KEY_PARTS.rows(study)


def mass_table(study: Study) -> str:
    """The masses as a table for the terminal; empty if there is nothing to show."""
    rows = mass_rows(study)
    if not rows or is_one_block(study):
        return ""
    lead = (
        f"Share of softmax's attention in the own block of {BLOCK}, on K chosen keys and on all "
        "others, which slots carry:"
    )
    return KEY_PARTS.table(rows, lead)


def keys_sentence(study: Study) -> str:
    """Which heads need keys, and which need more than 64; empty if nothing was measured."""
    rows = mass_rows(study)
    if not rows:
        return ""
    if is_one_block(study):
        return (
            f"All {study.tokens} tokens lie in one block of {BLOCK}; longer sequences (--tokens) "
            "show which heads need keys."
        )
    alone = written(median(values[0] for _, values in rows), ".0%")
    rests = [
        median(column) for column in zip(*(KEY_PARTS.left_of(v) for _, v in rows), strict=True)
    ]
    shares = [
        f"{written(1 - rest, '.0%')} with {number}"
        for number, rest in zip(KEYS, rests, strict=True)
        if number in (KEYS[0], USUAL, KEYS[-1])
    ]
    short = KEY_PARTS.short(rows)
    near = sum(values[0] >= ENOUGH for _, values in rows)
    text = (
        f"In the median head the own block of {BLOCK} tokens holds {alone} of softmax's attention, "
        f"{', '.join(shares[:-1])} and {shares[-1]} chosen keys. The block alone holds "
        f"{ENOUGH:.0%} in {near} of {len(rows)} heads, which need no keys; block and {USUAL} keys "
        f"do in {len(rows) - len(short)}."
    )
    if not short:
        return text
    return f"{text} The others need more keys or rely on slots: {name_heads(short)}."
