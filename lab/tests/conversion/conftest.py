"""Models whose attention is sharp enough to need keys; without transformers these do not run."""

from functools import partial
from pathlib import Path

import pytest
from tests.integrations.conftest import (  # noqa: F401
    one_thread,
    save_with_tokenizer,
    text,
    tiny,
)

from lln_lab.conversion import target_trials
from lln_lab.conversion.attention_cost import measure_calls

SHARP = {"num_hidden_layers": 3, "initializer_range": 0.4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def pytest_collection_modifyitems(items):
    """Batches here have two dozen tokens, and α and β from so few are warned of."""
    few = pytest.mark.filterwarnings("ignore::lln.errors.CalibrationWarning")
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(few)


@pytest.fixture(autouse=True)
def short_timing(monkeypatch):
    """Long calls are not what these tests are about."""
    monkeypatch.setattr(target_trials, "measure_calls", partial(measure_calls, most_seconds=0.0))


@pytest.fixture
def sharp(tiny):  # noqa: F811
    """A model whose attention is sharp enough to need keys."""
    return tiny("bert", **SHARP, **NO_DROPOUT)
