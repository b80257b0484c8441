"""The result of each part in one or two sentences, for the page and for the terminal."""

from __future__ import annotations

from lln_lab.demo.concentration import Concentration
from lln_lab.demo.speed import TIMED, Speed
from lln_lab.demo.trainees import Training
from lln_lab.report.numbers import round_length
from lln_lab.report.series import LOOKS


def concentration_headline(part: Concentration) -> str:
    """How far each attention is from softmax attention."""
    distances = "; ".join(
        f"{part.distance(part.entropy, name):.2f} bits of entropy and "
        f"{part.distance(part.gap, name):.3f} of spectral gap for {label}"
        for name, label in (
            ("lln_entropy", "entropy-matched LLN"),
            ("lln", "variance-matched LLN"),
            ("elu", "ELU + 1"),
        )
    )
    setting = f"Gaussian inputs, {_at(part.tokens)}, d\u00a0=\u00a0{part.width}"
    return f"Mean distance to softmax attention ({setting}): {distances}."


def speed_headline(part: Speed) -> str:
    """The length from which each linear attention is faster."""
    return " ".join(filter(None, (_verdict(part, name) for name in TIMED if name != "softmax")))


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


def training_headline(part: Training) -> str:
    """The losses in order, and LLN's distance to softmax."""
    last = part.points[-1].loss
    listed = ", ".join(f"{LOOKS[name].label} {last[name]:.3f}" for name in part.ranking())
    lead = last["softmax"] - last["lln"]
    side = "below" if lead > 0 else "above"
    return (
        f"Held-out loss after {part.points[-1].step:,} steps, in nats per byte, lowest first: "
        f"{listed}. LLN alone ended {abs(lead):.3f} {side} softmax."
    )
