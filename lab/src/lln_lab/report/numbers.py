"""How pages write numbers."""

from __future__ import annotations

from lln.checks.printing import written


def number(value: float, form: str) -> str:
    """A number in the given form, as `lln.checks.printing.written`, with a real minus sign."""
    return written(value, form).replace("-", "−")


def milliseconds(seconds: float | None) -> str:
    """Three significant digits, so that 0.41 ms and 1,230 ms both read well."""
    if seconds is None:
        return "–"
    value = 1e3 * seconds
    if value >= 100:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def round_length(length: float) -> str:
    """An interpolated sequence length with two digits, because it is not more exact than that."""
    return f"{float(f'{length:.2g}'):,.0f}"
