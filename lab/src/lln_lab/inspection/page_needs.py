"""How much of each head's attention window, sinks and chosen pages would hold, in words."""

from __future__ import annotations

from statistics import median

from lln.checks.printing import written
from lln_lab.inspection.page_masses import page_numbers
from lln_lab.inspection.parts import ENOUGH, Parts, name_heads
from lln_lab.inspection.study import Study

# Below this nothing is left, but for rounding.
_NOTHING = 1e-6


def page_parts(study: Study) -> Parts | None:
    """Window, sinks where there are any, pages and the rest; None if there is nothing to choose."""
    sizes = [layer.pages for layer in study.layers if layer.pages]
    if not sizes or _is_one_window(study):
        return None
    always = {"window": "mass.window"}
    if any(each["sinks"] for each in sizes):
        always["sinks"] = "mass.sinks"
    pages = sizes[0]["pages"]
    return Parts(always, "pages", "rest", "mass.unseen", page_numbers(pages), pages)


def _is_one_window(study: Study) -> bool:
    """Whether every query sees the whole sequence in its window."""
    windows = [layer.pages["window"] for layer in study.layers if layer.pages]
    return bool(windows) and study.tokens <= min(windows) + 1


def page_form(study: Study) -> str:
    """Window, sinks and pages with their sizes, for every direction that was measured."""
    forms = {}
    for layer in study.layers:
        if layer.pages:
            side = "before" if layer.is_causal else "on either side of"
            sinks = f" and {layer.pages['sinks']} sinks" if layer.pages["sinks"] else ""
            forms[f"{layer.pages['window']} tokens {side} a query{sinks}"] = layer.pages
    size = next(iter(forms.values()))["page_size"]
    return f"{', or '.join(forms)}; pages of {size} tokens"


def page_table(study: Study) -> str:
    """The masses as a table for the terminal; empty if there is nothing to show."""
    parts = page_parts(study)
    rows = parts.rows(study) if parts else []
    if not parts or not rows:
        return ""
    lead = f"Share of softmax's attention ({page_form(study)}), on P chosen pages and on the rest:"
    return parts.table(rows, lead)


def pages_sentence(study: Study) -> str:
    """Whether pages would do, and how many; empty if nothing was measured."""
    if _is_one_window(study):
        return (
            f"All {study.tokens} tokens lie in one window ({page_form(study)}); longer sequences "
            "(--tokens) show whether pages would do."
        )
    parts = page_parts(study)
    rows = parts.rows(study) if parts else []
    if not parts or not rows:
        return ""
    both = " and ".join(parts.always)
    alone = written(median(parts.alone(values) for _, values in rows), ".0%")
    columns = zip(*(parts.left_of(values) for _, values in rows), strict=True)
    shares = [
        f"{written(1 - median(rests), '.0%')} with {number}"
        for number, rests in zip(parts.numbers, columns, strict=True)
        if number in (parts.numbers[0], parts.usual, parts.numbers[-1])
    ]
    short = parts.short(rows)
    near = sum(parts.alone(values) >= ENOUGH for _, values in rows)
    hold = "holds" if len(parts.always) == 1 else "hold"
    text = (
        f"In the median head {both} {hold} {alone} of softmax's attention, "
        f"{', '.join(shares[:-1])} and {shares[-1]} chosen pages ({page_form(study)}). Without "
        f"pages {both} {hold} {ENOUGH:.0%} in {near} of {len(rows)} heads; with {parts.usual} "
        f"pages, {len(rows) - len(short)} heads do."
    )
    if max(parts.usual_left(values) for _, values in rows) < _NOTHING:
        return (
            f"{text} At {study.tokens} tokens {parts.usual} pages leave nothing out; longer "
            "sequences (--tokens) say more."
        )
    if not short:
        return text
    return f"{text} Those that hold less: {name_heads(short)}."
