"""Names, signatures and imports of ``lln.instruments``."""

import inspect
import re
import subprocess
import sys

import pytest
import torch

from lln import instruments
from lln.instruments import of_matrix

MEASURES = (
    "entropy",
    "log_normality",
    "score_variance",
    "spectral_gap",
    "temperature",
    "variance",
)
OF_MATRIX = ("entropy", "log_normality", "spectral_gap", "temperature", "variance")


def check_arguments_are_documented(function):
    documentation = inspect.getdoc(function)
    assert documentation
    for parameter in inspect.signature(function).parameters:
        assert re.search(rf"^\s+{parameter}: ", documentation, re.MULTILINE), parameter


@pytest.mark.parametrize("name", MEASURES)
def test_every_instrument_takes_the_same_arguments(name):
    parameters = inspect.signature(getattr(instruments, name)).parameters
    shared = inspect.signature(instruments.entropy).parameters
    assert [str(p) for p in parameters.values()][: len(shared)] == [str(p) for p in shared.values()]
    assert set(parameters) - set(shared) <= {"measured"}
    kinds = [p.kind for p in parameters.values()]
    assert set(kinds[2:]) == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    "function",
    [
        *(getattr(instruments, name) for name in MEASURES),
        *(getattr(of_matrix, name) for name in OF_MATRIX),
    ],
    ids=lambda function: f"{function.__module__}.{function.__name__}",
)
def test_arguments_are_documented(function):
    check_arguments_are_documented(function)


@pytest.mark.parametrize("name", MEASURES)
def test_calls_that_do_not_fit_name_the_instrument(name):
    call, query = getattr(instruments, name), torch.zeros(1, 1, 4, 2)
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'mask'"):
        call(query, query, mask=None)
    with pytest.raises(TypeError, match=rf"^{name}\(\) missing a required argument: 'key'"):
        call(query)
    with pytest.raises(TypeError, match=rf"^{name}\(\) too many positional arguments"):
        call(query, query, "lln")


def test_names_are_exported():
    assert set(MEASURES) | {"of_matrix"} <= set(instruments.__all__)
    assert all(hasattr(instruments, name) for name in instruments.__all__)


def test_optional_packages_load_only_when_needed_and_one_that_is_missing_is_named():
    """Compared with what torch brings along by itself."""
    script = """
import sys, torch
before = set(sys.modules)
import lln
from lln import instruments
query, key = torch.randn(2, 1, 1, 140, 8)
instruments.entropy(query, key)
instruments.log_normality(query, key)
instruments.spectral_gap(query, key, kind="lln")
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(loaded & {"scipy", "matplotlib", "transformers", "triton"}))
sys.modules["scipy.sparse.linalg"] = None
try:
    instruments.spectral_gap(query, key)
except lln.BackendUnavailableError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded, missing = done.stdout.splitlines()
    assert loaded == "[]"
    assert "pip install 'lln[instruments]'" in missing
