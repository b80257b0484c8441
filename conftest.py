"""What every test starts from: fixed seeds, a profile; on request poison and compiled passes."""

import os

import pytest
import torch
from hypothesis import settings

from lln.cpu import building
from lln.cpu import library as opening
from lln.functional import prepared_calls
from lln.testing import poison_empty
from lln.testing.processor import facts

settings.register_profile("local", deadline=None, max_examples=25)
settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True)
settings.register_profile("nightly", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "local"))

# Whatever was compiled on this machine; tests/kernels/launching/test_launcher.py and the fixture
# ``compiled`` have their own.
os.environ["LLN_LAUNCHER"] = "python"
os.environ.setdefault("LLN_CPU", "torch")

# Parallel workers already fill the cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_report_header():
    """Where these tests ran: sums and refusals differ from machine to machine."""
    return [f"{name}: {fact}" for name, fact in facts().items()]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Keep every test that was found, before -m leaves some out, for tests/test_targets.py."""
    config.found_tests = list(items)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_decided():
    """Tests put other chips and libraries in place, for which earlier decisions do not hold."""
    prepared_calls.clear()


@pytest.fixture
def poisoned():
    """Fresh memory holds NaN while the test runs."""
    with poison_empty():
        yield


@pytest.fixture(scope="session")
def path_of_library(tmp_path_factory):
    """The library of this installation; if it has none or that of other sources, one made here."""
    own = building.LIBRARY
    if not (own.exists() and building.fingerprint().encode() in own.read_bytes()):
        own = tmp_path_factory.mktemp("cpu") / own.name
    try:
        return building.build(own)
    except building.BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def functions(path_of_library):
    """What it computes, whether or not the passes are switched off."""
    try:
        opening._openmp()
    except OSError as error:
        pytest.skip(f"the passes run on PyTorch's threads, but {error}")
    return opening.open_library(path_of_library)


@pytest.fixture
def compiled(functions, monkeypatch):
    """The compiled passes in use, which are switched off otherwise."""
    monkeypatch.setattr(opening, "_found", functions)
