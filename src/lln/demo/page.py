"""The page: everything in one HTML file, without scripts or anything to load."""

from __future__ import annotations

import json
import math
import os
import platform
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from importlib import resources

import torch

from lln.demo.concentration import Concentration
from lln.demo.markup import section, table
from lln.demo.record import Part, State
from lln.demo.sections import concentration_section, speed_section, training_section
from lln.demo.speed import Speed
from lln.demo.training import Training

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
    environment: dict[str, str] = field(default_factory=lambda: read_environment())
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


def read_environment() -> dict[str, str]:
    """What the numbers depend on, as the page lists it."""
    from lln import __version__

    cores = os.cpu_count() or 1
    environment = {
        "lln": __version__,
        "PyTorch": torch.__version__,
        "threads": f"{torch.get_num_threads()} on {cores} CPUs",
        "Python": platform.python_version(),
        "system": f"{platform.system()}, {platform.machine()}",
        "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    }
    if hasattr(os, "getloadavg"):
        environment["load at start"] = f"{os.getloadavg()[0]:.1f}"
    return environment


def render_page(demo: Demo) -> str:
    """The page as it stands."""
    style = resources.files("lln.demo").joinpath("page.css").read_text("utf-8")
    running = bool(demo.lacking()) and not demo.interrupted
    # A page opened during the run keeps up with it.
    refresh = '<meta http-equiv="refresh" content="5">' if running else ""
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
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{refresh}<title>LLN attention demo</title><style>\n{style}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


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
    return json.dumps(_plain(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: object) -> object:
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
