"""The Python of docs/models.md runs as it stands, block after block."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "models.md"


@pytest.mark.skipif(not PAGE.is_file(), reason="the pages are not part of a source distribution")
def test_the_page_runs():
    names = {}
    blocks = re.findall(r"```python\n(.+?)```", PAGE.read_text("utf-8"), re.DOTALL)
    for block in blocks:
        exec(block, names)
        assert names.get("out") is None or names["out"].isfinite().all(), block
    assert len(blocks) == 10
