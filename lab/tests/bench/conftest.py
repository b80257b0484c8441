"""A machine that is idle, whatever runs beside the tests; and ranks, which are processes."""

import pytest
from tests.parallel.conftest import pool  # noqa: F401

from lln_lab.bench import environment
from lln_lab.bench.load import Load


@pytest.fixture(autouse=True)
def _idle(monkeypatch):
    monkeypatch.setattr(environment, "read_load", lambda: Load(0.0, 2))
