"""The tiny models of the Hugging Face tests."""

from pathlib import Path

import pytest
from lab.tests.conversion.conftest import sharp, short_timing  # noqa: F401
from tests.integrations.conftest import (  # noqa: F401
    one_thread,
    save_with_tokenizer,
    text,
    tiny,
)
from tests.integrations.test_command_places import folder  # noqa: F401
from tests.integrations.test_command_words import folders  # noqa: F401
from tests.integrations.test_docs import given  # noqa: F401


def pytest_collection_modifyitems(items):
    """Batches here have two dozen tokens, and α and β from so few are warned of."""
    few = pytest.mark.filterwarnings("ignore::lln.errors.CalibrationWarning")
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(few)
