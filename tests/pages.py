"""The Python of a page, for tests that run it as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
needs_pages = pytest.mark.skipif(
    not (ROOT / "docs").is_dir(), reason="the pages are not part of a source distribution"
)


def blocks(name):
    """Its blocks of Python, in their order."""
    return re.findall(r"```python\n(.+?)```", (ROOT / name).read_text("utf-8"), re.DOTALL)


def run(name, names):
    """Run one block after the other, as a reader would, and return the names they leave."""
    for block in blocks(name):
        exec(compile(block, name, "exec"), names)
        out = names.get("out")
        assert out is None or out.isfinite().all(), block
    return names
