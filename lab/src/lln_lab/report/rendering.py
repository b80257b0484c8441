"""Pages from jinja2 templates; every folder of ``lln_lab`` keeps the template of its page."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from lln_lab.report.numbers import milliseconds, number
from lln_lab.report.series import LOOKS
from lln_lab.report.theme import theme_css

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **content: object) -> str:
    """One self-contained HTML file, without scripts and external files.

    Args:
        template: Its path below ``lln_lab``, such as ``"demo/page.html"``.
        content: What the template shows; text is escaped, `markupsafe.Markup` is not.
    """
    return _environment().get_template(template).render(**content)


def render_text(template: str, **content: object) -> str:
    """`render` for a template given as text, which may extend those below ``lln_lab``."""
    return _environment().from_string(template).render(**content)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("lln_lab", ""),
        autoescape=True,
        keep_trailing_newline=True,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals.update(looks=LOOKS, theme_css=theme_css)
    environment.filters.update(milliseconds=milliseconds, number=number)
    return environment
