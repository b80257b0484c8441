"""Section 2: milliseconds against sequence length."""

from __future__ import annotations

from lln.studies.bench.spread import NOISY, Timed
from lln.studies.demo.speed import TIMED, Speed
from lln.studies.demo.state import missing
from lln.studies.report.chart import Axis, Line, Rule, line_chart, log_axis
from lln.studies.report.markup import figure, milliseconds, round_length, section, table
from lln.studies.report.series import LOOKS, legend

_LINEAR = tuple(name for name in TIMED if name != "softmax")

_INTRODUCTION = """
<p>Softmax attention compares every token with every other: twice the length, four times the work.
LLN attention does the same work for every token, however many there are. On short sequences its
fixed costs weigh more.</p>
"""


def speed_headline(part: Speed) -> str:
    """From which length on the linear attentions are faster."""
    return " ".join(filter(None, (_verdict(part, name) for name in _LINEAR)))


def speed_section(part: Speed, where: str, caution: str = "") -> str:
    """The section as HTML; ``where`` tells threads and versions, ``caution`` what disturbed it."""
    title = "2. When is it faster?"
    if not part.has_results:
        return section("speed", title, _INTRODUCTION + missing(part), part.state.value)
    caption = (
        f"<b>Forward pass</b>, float32, batch 1, {part.heads} heads of {part.width}; {where}. "
        "Both axes are logarithmic. Upright strokes: fastest to slowest run. Dashed: from this "
        "length on, the attention of that colour is faster than softmax; drawn only where the "
        "difference at the lengths on both sides is more than noise."
    )
    body = (
        f'{_INTRODUCTION}<p class="finding">{speed_headline(part)}</p>{caution}{_unsteady(part)}'
        f"{legend(list(TIMED))}"
        f'<div class="pair">{figure(_chart(part), caption)}{_table(part)}</div>'
    )
    return section("speed", title, body, part.state.value)


def _unsteady(part: Speed) -> str:
    """Says so where a series got faster with length, since no attention does."""
    found = {name: part.unsteady(name) for name in TIMED}
    listed = "; ".join(
        f"{LOOKS[name].label} at N = {', '.join(f'{n:,}' for n in lengths)}"
        for name, lengths in found.items()
        if lengths
    )
    if not listed:
        return ""
    return (
        f'<p class="warn">Less time than at a shorter length: {listed}. No attention does that; '
        "these runs were at the mercy of the machine, and what is said of them above is too.</p>"
    )


def _chart(part: Speed) -> str:
    measured = part.measured()
    times = {name: part.times(name) for name in TIMED}
    spread = {name: part.spread(name) for name in TIMED}
    every = [1e3 * end for series in spread.values() for ends in series.values() for end in ends]
    last = max(measured[-1], 2 * measured[0])
    ticks = tuple((n, f"{n:,}") for n in part.lengths if n <= last)
    x = Axis("sequence length N", measured[0] / 1.15, last * 1.15, ticks, log=True)
    places = {name: found.place for name in _LINEAR if (found := part.crossover(name))}
    rules = [
        Rule(f"{LOOKS[name].label}: N ≈ {round_length(place)}", x=place, key=name, row=row)
        for row, (name, place) in enumerate(places.items())
        if place is not None
    ]
    lines = [
        Line(
            name,
            [(n, 1e3 * seconds) for n, seconds in times[name].items()],
            " ms",
            ranges=[(n, 1e3 * low, 1e3 * high) for n, (low, high) in spread[name].items()],
        )
        for name in TIMED
    ]
    y = log_axis("milliseconds a call", min(every), max(every))
    return line_chart("milliseconds a call against sequence length", x, y, lines, rules)


def _verdict(part: Speed, name: str) -> str:
    label = LOOKS[name].label
    found = part.crossover(name)
    if found is None:
        return ""
    last = found.lengths[-1]
    ratio = part.times("softmax")[last] / part.times(name)[last]
    at_end = f"{ratio:.2g} times as fast as softmax at {_at(last)}"
    if found.place is not None:
        place = round_length(found.place)
        return f"{label} is faster than softmax from N\u00a0≈\u00a0{place}, {at_end}."
    if found.since is None and found.unclear is None:
        return f"{label} was not faster up to {_at(last)} ({at_end})."
    if found.since is None:
        return f"Whether {label} is faster than softmax at {_at(last)} is within noise ({at_end})."
    if found.unclear is not None:
        return (
            f"{label} is faster than softmax from {_at(found.since)}, {at_end}; where that begins "
            f"is within noise at {_at(found.unclear)}."
        )
    return f"{label} was faster at every length measured, {at_end}."


def _at(length: int) -> str:
    return f"N\u00a0=\u00a0{length:,}"


def _table(part: Speed) -> str:
    times = {name: part.timed(name) for name in TIMED}
    rows = []
    for n in part.measured():
        slow, fast = times["softmax"].get(n), times["lln"].get(n)
        ratio = "–" if slow is None or fast is None else f"{slow.median / fast.median:.2f}"
        rows.append([f"{n:,}", *(_cell(times[name].get(n)) for name in TIMED), ratio])
    head = ["N", *(LOOKS[name].label for name in TIMED), "softmax / LLN"]
    counts = sorted({len(runs) for name in TIMED for runs in part.runs[name].values()})
    runs = f"{counts[0]} to {counts[-1]}" if counts[0] != counts[-1] else f"{counts[0]}"
    note = (
        f"Milliseconds: medians of {runs} runs, taken in turn. softmax is PyTorch’s fused "
        "<code>scaled_dot_product_attention</code>; LLN is <code>lln_attention</code> in plain "
        "PyTorch, matching included; LLN + Diag is <code>lln_diag_attention</code>."
    )
    if any(time.is_noisy for series in times.values() for time in series.values()):
        note += f" ~: noisy, the middle half of the runs spans more than {NOISY:.0%} of the median."
    for name, n in part.dropped.items():
        note += f" {LOOKS[name].label} was left out from N = {n:,} to stay within the time."
    return f'<div class="panel">{table(head, rows)}<p class="small">{note}</p></div>'


def _cell(found: Timed | None) -> str:
    """Milliseconds, with ``~`` before those that are noisy."""
    if found is None:
        return milliseconds(None)
    return ("~" if found.is_noisy else "") + milliseconds(found.median)
