"""A machine that is idle, whatever runs beside the tests."""

import pytest

from lln.testing.load import Load
from lln_lab.bench import environment


@pytest.fixture(autouse=True)
def _idle(monkeypatch):
    monkeypatch.setattr(environment, "read_load", lambda: Load(0.0, 2))
