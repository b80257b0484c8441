"""How every figure is drawn and saved; matplotlib is imported only to draw."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lln.files import replacing

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure

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
    # Text in the SVG stays text, and the same figure gives the same file.
    "svg.fonttype": "none",
    "svg.hashsalt": "lln",
}


def save(path: Path, size: tuple[float, float], draw: Callable[[Figure], None]) -> list[Path]:
    """Draws a figure and returns its files, an SVG and a PNG.

    Args:
        path: Where they go, with or without a suffix; missing folders are created.
        size: Width and height in inches.
        draw: Fills the empty figure.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    written = [path.with_suffix(suffix) for suffix in SUFFIXES]
    with mpl.rc_context(_STYLE):
        # Not pyplot: no window, and no global state.
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        for place in written:
            metadata: Any = {"Date": None} if place.suffix == ".svg" else {}
            with replacing(place) as file:
                figure.savefig(file, format=place.suffix[1:], dpi=150, metadata=metadata)
    return written
