"""Make links that work on GitHub work on the site too; mkdocs calls these functions.

README, DESIGN, CONTRIBUTING and SECURITY stand at the top of the repository and become pages of the
site, and so do the tables that programs write. Other files that a page links to, an example for
instance, become files of the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "DESIGN.md": "design.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "lab/results/tables.md": "tables.md",
}
_SOURCES = {page: source for source, page in PAGES.items()}
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are written outside of docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links relative to the repository's files into links relative to the site's."""
    here = page.file.src_uri
    folder = posixpath.dirname(_SOURCES.get(here, f"docs/{here}"))

    def relink(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        on_site = PAGES.get(target) or target.removeprefix("docs/")
        if on_site == target and (ROOT / target).is_file():
            on_site = f"files/{target}"
            if files.get_file_from_path(on_site) is None:
                files.append(File.generated(config, on_site, abs_src_path=str(ROOT / target)))
        relative = posixpath.relpath(on_site, posixpath.dirname(here) or ".")
        return f"]({relative}{link[2] or ''})"

    # Code may hold brackets that only look like links.
    parts = re.split(r"(```.*?```)", markdown, flags=re.DOTALL)
    return "".join(p if p.startswith("```") else _LINK.sub(relink, p) for p in parts)
