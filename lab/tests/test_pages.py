"""The Python of pages that need the laboratory runs as it stands."""

import pytest
from tests.pages import needs_pages, run
from tests.test_pages import one_thread  # noqa: F401

pytestmark = needs_pages


def test_the_tutorial_on_studying_runs(tmp_path):
    pytest.importorskip("scipy")
    names = run("docs/tutorials/study.md", {})
    assert len(list(names["log"].records())) == 4
    assert list((tmp_path / "runs/1").iterdir())
