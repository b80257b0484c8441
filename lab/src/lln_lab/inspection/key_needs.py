"""How much of each head's attention its block, chosen keys and slots would hold, in words."""

from __future__ import annotations

from statistics import median

from lln.checks.printing import written
from lln_lab.inspection.head_masses import BLOCK
from lln_lab.inspection.key_masses import KEYS
from lln_lab.inspection.study import Study

# The number of keys that sentences and maps speak of, and the share that counts as enough.
USUAL, ENOUGH = 64, 0.9
# Heads in a sentence, and lines of the table in the terminal; the page has all.
_MOST_NAMED, _MOST_LINES = 8, 16


def is_one_block(study: Study) -> bool:
    """Whether a whole sequence lies in one block, so that nothing is left to choose."""
    return study.tokens <= BLOCK


def mass_rows(study: Study) -> list[tuple[str, list[float]]]:
    """Every head with the masses of its block and, for each number, of chosen keys and slots.

    The numbers are those of block, keys (16 … 256) and slots (16 … 256). Heads whose block and 64
    keys hold least come first.
    """
    names = [f"mass.{part}_{number}" for part in ("keys", "rest") for number in KEYS]
    cells = study.cells("mass.block", *names)
    at = 1 + len(KEYS) + KEYS.index(USUAL)
    cells.sort(key=lambda cell: -cell[2][at])
    return [(f"{layer}.{head}", list(values)) for layer, head, values in cells]


def mass_table(study: Study) -> str:
    """The masses as a table for the terminal; empty if there is nothing to show."""
    rows = mass_rows(study)
    if not rows or is_one_block(study):
        return ""
    count = len(KEYS)
    lines = [
        f"Share of softmax's attention in the own block of {BLOCK}, on K chosen keys and on all "
        "others, which slots carry:",
        " head   block" + "".join(f"{f'K = {number}, slots':>16}" for number in KEYS),
    ]
    for name, (block, *masses) in rows[:_MOST_LINES]:
        pairs = zip(masses[:count], masses[count:], strict=True)
        cells = (f"{written(keys, '.0%'):>9}{written(rest, '.0%'):>7}" for keys, rest in pairs)
        lines.append(f"{name:>5}{written(block, '.0%'):>8}" + "".join(cells))
    left = len(rows) - _MOST_LINES
    if left > 0:
        lines.append(f"… and {left} heads more with less on slots at K = {USUAL}; see the page.")
    return "\n".join(lines)


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
    count, at = len(KEYS), KEYS.index(USUAL)
    alone = written(median(values[0] for _, values in rows), ".0%")
    rests = [median(values[1 + count + place] for _, values in rows) for place in range(count)]
    shares = [
        f"{written(1 - rest, '.0%')} with {number}"
        for number, rest in zip(KEYS, rests, strict=True)
        if number in (KEYS[0], USUAL, KEYS[-1])
    ]
    short = [(name, 1 - values[1 + count + at]) for name, values in rows]
    short = [(name, held) for name, held in short if held < ENOUGH]
    near = sum(values[0] >= ENOUGH for _, values in rows)
    text = (
        f"In the median head the own block of {BLOCK} tokens holds {alone} of softmax's attention, "
        f"{', '.join(shares[:-1])} and {shares[-1]} chosen keys. The block alone holds "
        f"{ENOUGH:.0%} in {near} of {len(rows)} heads, which need no keys; block and {USUAL} keys "
        f"do in {len(rows) - len(short)}."
    )
    if not short:
        return text
    named = [f"{name} ({written(held, '.0%')})" for name, held in short[:_MOST_NAMED]]
    left = len(short) - _MOST_NAMED
    more = f" and {left} more" if left > 0 else ""
    return f"{text} The others need more keys or rely on slots: {', '.join(named)}{more}."
