"""Pages from jinja2 templates; every folder of ``lln_lab`` keeps the template of its page."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from lln.errors import BackendUnavailableError
from lln_lab.report.numbers import milliseconds, number
from lln_lab.report.series import LOOKS
from lln_lab.report.theme import theme_css

if TYPE_CHECKING:
    from jinja2 import Environment


def check_page_packages() -> None:
    """Refuse to start if a package for the page is missing.

    Raises:
        BackendUnavailableError: One sentence with what to install.
    """
    from importlib.util import find_spec

    missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
    if missing:
        raise BackendUnavailableError(
            f"the page needs {' and '.join(missing)}; run pip install 'lln[instruments]'."
        )


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
