"""The page: everything in one HTML file, without scripts or anything to load."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from html import escape

from lln.studies.demo.concentration import Concentration
from lln.studies.demo.sections import concentration_section, speed_section, training_section
from lln.studies.demo.speed import Speed
from lln.studies.demo.state import Part, State
from lln.studies.demo.training import Training
from lln.studies.report.document import html_document, json_document, read_environment
from lln.studies.report.markup import section, table

_EXAMPLE = """\
import torch
from lln import lln_diag_attention

query, key, value = torch.randn(3, 2, 8, 4096, 64)   # each [batch, heads, tokens, head width]
out = lln_diag_attention(query, key, value)          # no 4096 × 4096 matrix on the way"""

_METHOD = """
<p>Linear Log-Normal (LLN) attention weighs key <i>j</i> for query <i>i</i> by
⟨e<sup>αq<sub>i</sub></sup>, e<sup>βk<sub>j</sub></sup>⟩, elementwise exponentials and their inner
product. Written out, that is two softmaxes, one after the other:</p>
<div class="flow">
<div class="step"><b>N keys and values</b>
<div class="formula">k<sub>j</sub>, v<sub>j</sub></div>
<div class="small">as many as there are tokens</div></div>
<div class="go">softmax over<br>tokens <span class="arrow"></span></div>
<div class="step"><b>d slots</b>
<div class="formula">C<sub>f</sub> = Σ<sub>j</sub> softmax<sub>j</sub>(β k<sub>jf</sub>)
v<sub>j</sub></div>
<div class="formula">L<sub>f</sub> = logsumexp<sub>j</sub>(β k<sub>jf</sub>)</div>
<div class="small">a mean value and a log-mass for each feature</div></div>
<div class="go">softmax over<br>slots <span class="arrow"></span></div>
<div class="step"><b>N outputs</b>
<div class="formula">out<sub>i</sub> = Σ<sub>f</sub> softmax<sub>f</sub>(α q<sub>if</sub> +
L<sub>f</sub>) C<sub>f</sub></div>
<div class="small">each a mix of the slots</div></div>
</div>
<p>The N × N matrix P is never formed: time and memory grow with N, not N².
α and β are temperatures. Set from the inputs, they give P the spread that softmax attention would
have.</p>
"""


@dataclass
class Demo:
    """Everything the page shows."""

    concentration: Concentration = field(default_factory=Concentration)
    speed: Speed = field(default_factory=Speed)
    training: Training = field(default_factory=Training)
    environment: dict[str, str] = field(default_factory=read_environment)
    interrupted: bool = False

    def parts(self) -> dict[str, Part]:
        """The parts by name, in order."""
        return {
            "concentration": self.concentration,
            "speed": self.speed,
            "training": self.training,
        }

    def lacking(self) -> list[str]:
        """Parts that are not complete."""
        return [name for name, part in self.parts().items() if part.state is not State.DONE]


def render_page(demo: Demo) -> str:
    """The page as it stands."""
    running = bool(demo.lacking()) and not demo.interrupted
    where = f"PyTorch threads: {demo.environment['threads']}, version {demo.environment['PyTorch']}"
    rows = [[escape(name), escape(value)] for name, value in demo.environment.items()]
    body = "".join(
        (
            "<h1>Linear Log-Normal attention, measured here</h1>"
            '<p class="lead">What <code>lln demo</code> found on this machine, '
            f"{escape(demo.environment['date'])}.</p>",
            _notice(demo, running),
            section("method", "What it is", _METHOD),
            concentration_section(demo.concentration),
            speed_section(demo.speed, escape(where), _busy(demo.environment)),
            training_section(demo.training),
            section("use", "Use it", f"<pre><code>{escape(_EXAMPLE)}</code></pre>"),
            section(
                "environment",
                "Environment",
                f'<div class="panel">{table([], rows)}</div>'
                '<p class="small" style="margin-top:.9rem">The numbers of this page lie beside it '
                "as JSON. The method: arXiv 2311.13541.</p>",
            ),
        )
    )
    return html_document("LLN attention demo", body, refresh=running)


def _notice(demo: Demo, running: bool) -> str:
    """What is missing, where anything is."""
    lacking = demo.lacking()
    if not lacking:
        return ""
    reason = "The run is still going on" if running else "The run was interrupted"
    return f'<p class="warn"><b>{reason}.</b> Not complete: {", ".join(lacking)}.</p>'


def _busy(environment: dict[str, str]) -> str:
    """A caution where other work kept the processors from the start."""
    load, cores = float(environment.get("load at start", 0)), os.cpu_count() or 1
    if load < 0.7 * cores:
        return ""
    return (
        f'<p class="warn">This machine was busy with other work (load {load:.1f} on {cores} CPUs '
        "at the start): these times are longer and noisier than they need be.</p>"
    )


def render_json(demo: Demo) -> str:
    """The numbers of the page."""
    content = {
        "complete": not demo.lacking(),
        "environment": demo.environment,
        **{name: part.as_json() for name, part in demo.parts().items()},
    }
    return json_document(content)
