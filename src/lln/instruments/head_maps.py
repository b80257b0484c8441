"""A picture of what a capture found: one map per instrument, a line per layer, a cell per head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lln.checks.printing import written
from lln.errors import BackendUnavailableError, InvalidInputError
from lln.files import replacing
from lln.instruments.robust_ends import robust_ends

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Inches: a cell with and without a number, a line, a letter of a layer's name, around a map.
_CELL, _NARROW, _ROW, _LETTER, _SIDES, _ENDS = 0.55, 0.25, 0.3, 0.075, 1.0, 1.1
_MOST_ABREAST = 3
_UNITS = {"entropy": "bits"}
# With more heads than this the numbers do not fit into the cells.
_MOST_NUMBERED = 16


def draw_maps(maps: Mapping[str, Sequence[Sequence[float]]], layers: Sequence[str]) -> Figure:
    """The maps side by side; colours end at the last number that is not an extreme.

    Args:
        maps: By instrument: a number per layer and head, NaN = not measured.
        layers: Names of the layers.

    Raises:
        BackendUnavailableError: If matplotlib is not installed.
    """
    try:
        # Not pyplot: no window, and no global state.
        from matplotlib.figure import Figure
    except ImportError:
        raise BackendUnavailableError(
            "a picture needs matplotlib; install it with pip install 'lln[instruments]'."
        ) from None
    abreast = min(len(maps), _MOST_ABREAST)
    down = math.ceil(len(maps) / abreast)
    heads = max(len(row) for grid in maps.values() for row in grid)
    names = _LETTER * max(map(len, layers))
    # No narrower than a title.
    cell = _CELL if heads <= _MOST_NUMBERED else _NARROW
    width = names + abreast * (max(cell * heads, 2.0) + _SIDES)
    figure = Figure((width, down * (_ROW * len(layers) + _ENDS)), layout="constrained")
    places = figure.subplots(down, abreast, squeeze=False)
    for index, place in enumerate(places.flat):
        if index >= len(maps):
            place.set_axis_off()
            continue
        name = list(maps)[index]
        _draw_map(place, name, maps[name], heads)
        place.set_yticks(range(len(layers)), layers if index % abreast == 0 else [""] * len(layers))
    return figure


def _draw_map(axes: Any, title: str, grid: Sequence[Sequence[float]], heads: int) -> None:
    rows = [[*row, *[math.nan] * (heads - len(row))] for row in grid]
    low, high = robust_ends([value for row in rows for value in row])
    shown = [[value if math.isfinite(value) else math.nan for value in row] for row in rows]
    image = axes.imshow(shown, cmap="cividis", vmin=low, vmax=high, aspect="auto")
    axes.set_title(title)
    axes.set_xlabel("head")
    axes.set_xticks(range(0, heads, max(1, math.ceil(heads / _MOST_NUMBERED))))
    axes.tick_params(length=0)
    beyond = (
        any(value < low for row in shown for value in row),
        any(value > high for row in shown for value in row),
    )
    ends = {(True, True): "both", (True, False): "min", (False, True): "max"}
    scale = axes.figure.colorbar(image, ax=axes, extend=ends.get(beyond, "neither"))
    # Whole numbers at the marks, not what is left of them beside a sum above the scale.
    scale.formatter.set_useOffset(False)
    scale.set_label(_UNITS.get(title, ""))
    if heads > _MOST_NUMBERED:
        return
    for layer, row in enumerate(rows):
        for head, value in enumerate(row):
            text = "–" if math.isnan(value) else written(value, ".3g")
            # Light on dark colours; what is not finite has no colour.
            is_dark = math.isfinite(value) and value - low < 0.5 * (high - low)
            look: Any = {"ha": "center", "va": "center", "fontsize": 7}
            axes.text(head, layer, text, color="white" if is_dark else "black", **look)


def save_figure(figure: Figure, path: Path) -> None:
    """Write it as the suffix says, PNG without one.

    Raises:
        InvalidInputError: If matplotlib does not know that format.
    """
    form, known = path.suffix[1:].lower() or "png", figure.canvas.get_supported_filetypes()
    if form not in known:
        raise InvalidInputError(
            f"path must end in a format of pictures, got {path.name!r}; there are "
            f"{', '.join(known)}."
        )
    with replacing(path) as file:
        figure.savefig(file, format=form, dpi=150)
