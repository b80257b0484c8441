"""Small pieces of HTML that every section of the page is made of."""

from __future__ import annotations

from collections.abc import Sequence

from lln.printing import written
from lln.studies.report.series import LOOKS


def section(ident: str, title: str, body: str, state: str = "") -> str:
    """A section with its heading, and how far it has come."""
    badge = f'<span class="state">{state}</span>' if state else ""
    return f'<section id="{ident}"><h2>{title}{badge}</h2>{body}</section>'


def figure(body: str, caption: str, kind: str = "") -> str:
    """A figure with its caption."""
    attribute = f' class="{kind}"' if kind else ""
    return f"<figure{attribute}>{body}<figcaption>{caption}</figcaption></figure>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column names the row; it scrolls where the screen is narrow."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    top = f"<thead><tr>{top}</tr></thead>" if head else ""
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{top}<tbody>{lines}</tbody></table></div>'


def swatch(key: str, label: str | None = None) -> str:
    """An attention's name behind a dot of its colour."""
    return f'<span class="dot c-{key}"></span>{label or LOOKS[key].label}'


def contents(entries: Sequence[tuple[str, str]]) -> str:
    """Links to the sections of the page, from their idents and titles."""
    items = "".join(f'<li><a href="#{ident}">{title}</a></li>' for ident, title in entries)
    return f'<nav class="contents" aria-label="Contents"><ul>{items}</ul></nav>'


def number(value: float, form: str) -> str:
    """A number in the given form, as `lln.printing.written`, with a real minus sign."""
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
    """An interpolated sequence length, to two digits: it is no sharper than that."""
    return f"{float(f'{length:.2g}'):,.0f}"
