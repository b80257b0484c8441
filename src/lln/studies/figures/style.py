"""How all figures look, and how they are saved; matplotlib is imported only to draw."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lln.errors import BackendUnavailableError
from lln.files import replacing

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with every common colour blindness; the line styles and
# markers say the same thing again without colour.
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
SUFFIXES = (".svg", ".png")
_STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "grid.alpha": 0.25,
    "legend.columnspacing": 1.4,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    # A text in the SVG stays a text, and the same figure gives the same file.
    "svg.fonttype": "none",
    "svg.hashsalt": "lln",
}


def save(path: Path, size: tuple[float, float], draw: Callable[[Figure], None]) -> list[Path]:
    """Draws a figure and returns its files, an SVG and a PNG.

    Args:
        path: Where they go, with or without a suffix; folders are made.
        size: Width and height in inches.
        draw: Fills the empty figure.

    Raises:
        BackendUnavailableError: If matplotlib is not installed.
    """
    check_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    written = [path.with_suffix(suffix) for suffix in SUFFIXES]
    with mpl.rc_context(_STYLE):
        # A figure of its own, not pyplot's: no window, no state left behind.
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        for place in written:
            metadata: Any = {"Date": None} if place.suffix == ".svg" else {}
            with replacing(place) as file:
                figure.savefig(file, format=place.suffix[1:], dpi=150, metadata=metadata)
    return written


def check_matplotlib() -> None:
    """Say how to get matplotlib where it is missing, before anything is measured."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise BackendUnavailableError(
            "figures need matplotlib; install it with pip install 'lln[instruments]'."
        )


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
