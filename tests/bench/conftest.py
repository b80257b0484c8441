"""A machine that is idle, whatever runs beside the tests."""

import pytest

from lln.bench import environment
from lln.load import Load


@pytest.fixture(autouse=True)
def _idle(monkeypatch):
    monkeypatch.setattr(environment, "read_load", lambda: Load(0.0, 2))
