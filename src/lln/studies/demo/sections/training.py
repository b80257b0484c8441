"""Section 3: held-out loss against training steps."""

from __future__ import annotations

import math
from html import escape

from lln.studies.demo.state import State, missing
from lln.studies.demo.training import TRAINED, Training
from lln.studies.report.chart import Line, Rule, line_chart, linear_axis
from lln.studies.report.markup import figure, milliseconds, section, swatch, table
from lln.studies.report.series import LOOKS, legend

_CAUTION = """
<p class="warn">A demonstration, not evidence: one seed, one tiny model, seconds of training. Most
bytes are told by their neighbours, which a block sees as well as the whole matrix does; what only
distant tokens can tell is not tested here.</p>
"""


def training_headline(part: Training) -> str:
    """The losses in order, and LLN's distance to softmax."""
    last = part.points[-1].loss
    listed = ", ".join(
        f"{LOOKS[name].label} {last[name]:.3f}" for name in sorted(TRAINED, key=last.__getitem__)
    )
    lead = last["softmax"] - last["lln"]
    side = "below" if lead > 0 else "above"
    return (
        f"Held-out loss after {part.points[-1].step:,} steps, in nats a byte, lowest first: "
        f"{listed}. LLN alone ended {abs(lead):.3f} {side} softmax."
    )


def training_section(part: Training) -> str:
    """The section as HTML."""
    title, size = "3. Does it learn?", part.size
    text = (
        "<p>A small encoder guesses masked bytes of real text: "
        f"{size.layers} layers, {size.width} wide, {size.heads} heads of {size.block_size}, "
        f"{size.length} bytes of context. Four copies start from the same weights, see the same "
        "batches and differ in their attention alone. Diag is softmax attention inside blocks of "
        f"{size.block_size} bytes; LLN + Diag is the plain average of the two.</p>"
    )
    if not part.has_results:
        return section("training", title, text + missing(part), part.state.value)
    caption = (
        f"<b>Held-out loss</b> on {escape(part.corpus)}; held out: {part.split}. "
        f"{part.masked:.0%} of the bytes are masked, {part.batch} sequences a step, seed "
        f"{part.seed}. All start from guessing by frequency."
    )
    if part.state is not State.DONE:
        caption += " Training was not over: the learning rate had not come down to its end."
    body = (
        f'{text}<p class="finding">{training_headline(part)}</p>{_CAUTION}{legend(list(TRAINED))}'
        f'<div class="pair">{figure(_chart(part), caption)}{_table(part)}</div>'
    )
    return section("training", title, body, part.state.value)


def _chart(part: Training) -> str:
    lines = [
        Line(name, [(point.step, point.loss[name]) for point in part.points], " nats")
        for name in TRAINED
    ]
    seen = [loss for line in lines for _, loss in line.points if math.isfinite(loss)]
    rules = [Rule("byte frequencies alone", y=part.unigram)]
    x = linear_axis("training steps", 0, part.points[-1].step)
    margin = 0.05 * (max(seen) - min(seen)) + 0.01
    y = linear_axis("held-out loss, nats a masked byte", min(seen) - margin, max(seen) + margin)
    return line_chart("held-out loss against training steps", x, y, lines, rules)


def _table(part: Training) -> str:
    last = part.points[-1]
    rows = [
        [
            swatch(name),
            f"{last.loss[name]:.3f}",
            f"{last.step:,}",
            milliseconds(part.seconds_a_step(name)),
        ]
        for name in sorted(TRAINED, key=last.loss.__getitem__)
    ]
    rows.append(["byte frequencies", f"{part.unigram:.3f}", "–", "–"])
    head = ["attention", "loss, nats", "steps", "ms a step"]
    note = (
        "On held-out text, at the last evaluation. Time of a step: median; forward, backward and "
        "update."
    )
    return f'<div class="panel">{table(head, rows)}<p class="small">{note}</p></div>'
