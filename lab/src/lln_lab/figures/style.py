"""How the paper's figures show each attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, distinct for every common colour blindness; line styles and markers
# differ too.
LOOKS: dict[str, dict[str, Any]] = {
    "softmax": {"color": "#000000", "linestyle": "-", "linewidth": 5, "alpha": 0.35},
    "unmatched": {"color": "#009E73", "linestyle": ":", "marker": "x"},
    "paper": {"color": "#E69F00", "linestyle": "-.", "marker": "s"},
    "variance": {"color": "#0072B2", "linestyle": "--", "marker": "o"},
    "entropy": {"color": "#D55E00", "linestyle": "-", "marker": "^"},
    "elu": {"color": "#CC79A7", "linestyle": "--", "marker": "v"},
    "relu": {"color": "#56B4E9", "linestyle": "-.", "marker": "D"},
    "quadratic": {"color": "#7F7F7F", "linestyle": ":", "marker": "P"},
}
NAMES = {
    "softmax": "softmax attention",
    "unmatched": "LLN, α = β = 1",
    "paper": "LLN, paper's constants",
    "variance": "LLN, variance matched",
    "entropy": "LLN, entropy matched",
    "elu": "ELU + 1",
    "relu": "ReLU",
    "quadratic": "quadratic",
}


def plain_ticks(axes: Axes) -> None:
    """Writes 0.1, 1, 10 instead of powers of ten, and 2 and 5 between them on short axes."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    plain = FuncFormatter(lambda value, _: f"{value:g}")
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            if high / low < 300:
                axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(plain)
            axis.set_minor_formatter(NullFormatter())


def title(axes: Axes, text: str) -> None:
    """A small heading at the left, as all panels have."""
    axes.set_title(text, loc="left", fontsize=10)
