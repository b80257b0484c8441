"""Compiled passes for the cases that name them; elsewhere they are switched off."""

import pytest


@pytest.fixture(autouse=True)
def with_compiled_passes(request):
    """Where a case asks for them."""
    if "impl" in request.fixturenames and request.getfixturevalue("impl") == "cpu":
        request.getfixturevalue("compiled")
