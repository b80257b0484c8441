"""How each attention looks on every page: its name, line and marker; `theme` has the colours."""

from __future__ import annotations

from typing import Any, NamedTuple

from lln_lab.report.theme import colour


class Look(NamedTuple):
    """One attention.

    Attributes:
        label: Its name.
        marker: Marker code of matplotlib.
        dashes: Lengths of strokes and gaps in points; empty = a solid line.
        colour_name: Name of its colour in `lln_lab.report.theme`.
    """

    label: str
    marker: str
    dashes: tuple[int, ...]
    colour_name: str

    @property
    def line(self) -> dict[str, Any]:
        """Matplotlib options for its lines."""
        style = (0, self.dashes) if self.dashes else "-"
        return {"color": colour(self.colour_name), "linestyle": style}


LOOKS = {
    name: Look(label, marker, dashes, colour_name or name)
    for name, label, marker, dashes, colour_name in (
        ("softmax", "softmax", "o", (), ""),
        ("lln", "LLN", "s", (), ""),
        ("lln_entropy", "LLN, entropy-matched", "D", (), ""),
        ("lln_unit", "LLN, α = β = 1", "^", (2, 4), ""),
        ("elu", "ELU + 1", "v", (7, 4), ""),
        ("relu", "ReLU", "x", (7, 4), ""),
        ("quadratic", "quadratic", "P", (7, 4), ""),
        ("diag", "Diag", "v", (7, 4), ""),
        ("lln_diag", "LLN + Diag", "^", (), ""),
        ("lln_keys", "LLN + exact keys", "P", (), ""),
        ("normal", "fitted normal", "o", (6, 3), "lln_diag"),
        ("theory", "theory", "o", (3, 4), "soft"),
    )
}
