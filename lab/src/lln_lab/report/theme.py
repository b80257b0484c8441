"""The colours of pages and charts, each for a light and for a dark screen.

Charts are drawn with the light colours. `themed` then replaces each by a CSS variable, so that a
chart follows the page around it.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

# No two names share a light colour, and no colour map contains any of them.
_COLOURS = {
    "ground": ("#fbfbf9", "#14171b"),
    "panel": ("#ffffff", "#1b2026"),
    "text": ("#1c2127", "#e4e8ec"),
    "soft": ("#59636e", "#a1acb8"),
    "hair": ("#dfe2e5", "#333b44"),
    "accent": ("#0b63a5", "#7dbbf0"),
    "warn-ground": ("#fff5dc", "#322a14"),
    "warn-hair": ("#e3c168", "#7d6726"),
    "softmax": ("#1c2126", "#f0f3f6"),
    "lln": ("#0072b2", "#3d9be0"),
    "lln_entropy": ("#3f9fd8", "#9ad4ff"),
    "lln_unit": ("#8290a3", "#8794a6"),
    "elu": ("#009e73", "#2cc39a"),
    "relu": ("#c0588f", "#e293bd"),
    "quadratic": ("#8f7d00", "#cdbb45"),
    "diag": ("#c98300", "#f0b040"),
    "lln_diag": ("#d55e00", "#ff8a3d"),
    "lln_keys": ("#7a3fb0", "#b98af0"),
}
_NAMES = {light: name for name, (light, _) in _COLOURS.items()}

# Lightness rises evenly from dark blue to yellow, for every kind of colour vision.
SEQUENTIAL = "cividis"
# For numbers with a sign: blue below zero, almost white at zero, orange above.
DIVERGING = ("#144a8a", "#76a5d1", "#f2f1ed", "#e9a370", "#9e4008")


def colour(name: str) -> str:
    """The light colour of a name, to draw with."""
    return _COLOURS[name][0]


@cache
def colour_map(centred: bool = False) -> Colormap:
    """The colour map of numbers; ``centred``: of signed numbers."""
    import matplotlib as mpl
    from matplotlib.colors import LinearSegmentedColormap

    if centred:
        return LinearSegmentedColormap.from_list("lln", DIVERGING)
    return mpl.colormaps[SEQUENTIAL]


def themed(svg: str) -> str:
    """A drawing with its named colours replaced by CSS variables."""
    return re.sub(
        "#[0-9a-f]{6}",
        lambda found: f"var(--{_NAMES[found[0]]})" if found[0] in _NAMES else found[0],
        svg,
    )


def theme_css() -> str:
    """The variables, for both kinds of screen."""
    light, dark = (
        "".join(f"--{name}:{pair[side]};" for name, pair in _COLOURS.items()) for side in (0, 1)
    )
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
    )
