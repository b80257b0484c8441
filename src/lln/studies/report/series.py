"""How each attention looks, everywhere on the page: name, colour class, dash and marker."""

from __future__ import annotations

from dataclasses import dataclass

# Shapes around the origin, about 8 units across.
MARKERS = {
    "circle": '<circle r="3.6"/>',
    "square": '<path d="M-3.3-3.3h6.6v6.6h-6.6z"/>',
    "diamond": '<path d="M0-4.6 4.6 0 0 4.6-4.6 0z"/>',
    "up": '<path d="M0-4.4 4.2 3.2h-8.4z"/>',
    "down": '<path d="M0 4.4 4.2-3.2h-8.4z"/>',
    "cross": '<path class="open" d="M-3.4-3.4 3.4 3.4M-3.4 3.4 3.4-3.4"/>',
    "plus": '<path class="open" d="M-4.2 0h8.4M0-4.2v8.4"/>',
}


@dataclass(frozen=True)
class Look:
    """One attention: colours come from the class ``c-<key>`` of the style sheet."""

    label: str
    marker: str
    dash: str = ""


LOOKS = {
    "softmax": Look("softmax", "circle"),
    "lln": Look("LLN", "square"),
    "lln_entropy": Look("LLN, entropy-matched", "diamond"),
    "lln_unit": Look("LLN, α = β = 1", "up", "2 4"),
    "elu": Look("ELU + 1", "down", "7 4"),
    "relu": Look("ReLU", "cross", "7 4"),
    "quadratic": Look("quadratic", "plus", "7 4"),
    "diag": Look("Diag", "down", "7 4"),
    "lln_diag": Look("LLN + Diag", "up"),
    "normal": Look("fitted normal", "circle", "6 3"),
    "theory": Look("theory", "circle", "3 4"),
}


def marker(key: str, x: float, y: float, note: str = "") -> str:
    """The attention's marker at a point, with a note for the pointer that rests on it."""
    title = f"<title>{note}</title>" if note else ""
    shape = MARKERS[LOOKS[key].marker]
    return f'<g class="mark" transform="translate({x:.1f} {y:.1f})">{title}{shape}</g>'


def legend(
    keys: list[str],
    labels: dict[str, str] | None = None,
    *,
    marks: bool = True,
    filled: tuple[str, ...] = (),
) -> str:
    """A list of line samples and names.

    Args:
        keys: The attentions.
        labels: Names where a plot needs others.
        marks: Whether the plot marks its points.
        filled: Those that are drawn as areas.
    """
    items = []
    for key in keys:
        look = LOOKS[key]
        label = (labels or {}).get(key, look.label)
        dash = f' stroke-dasharray="{look.dash}"' if look.dash else ""
        if key in filled:
            drawn = '<path class="bars" d="M1 1h32v10h-32z"/>'
        else:
            drawn = f'<path class="line" d="M1 6h32"{dash}/>{marker(key, 17, 6) if marks else ""}'
        sample = (
            f'<svg class="c-{key}" viewBox="0 0 34 12" width="34" height="12" aria-hidden="true">'
            f"{drawn}</svg>"
        )
        items.append(f"<li>{sample}{label}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'
