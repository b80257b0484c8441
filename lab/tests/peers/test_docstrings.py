"""Every public method says what it does, itself or through the base class it overrides."""

import inspect
import pkgutil
from importlib import import_module

import pytest

from lln_lab import peers

MODULES = [
    import_module(f"lln_lab.peers.{found.name}") for found in pkgutil.iter_modules(peers.__path__)
]
CLASSES = [
    one
    for module in MODULES
    for one in vars(module).values()
    if inspect.isclass(one) and one.__module__ == module.__name__ and one.__name__[0] != "_"
]


def undocumented(one):
    """Public methods without a docstring of their own or of a base class of ours."""
    ours = [base for base in one.__mro__ if base.__module__.startswith("lln_lab.")]
    for name, method in vars(one).items():
        if inspect.isfunction(method) and name[0] != "_":
            said = [vars(base)[name].__doc__ for base in ours if name in vars(base)]
            if not any(said):
                yield name


@pytest.mark.parametrize("one", CLASSES)
def test_every_method_is_documented(one):
    assert list(undocumented(one)) == []


def test_a_method_without_a_docstring_is_found():
    class Bare(peers.Core):
        def forward(self, query, key, value, key_mask=None):
            return value

        def other(self):
            pass

    Bare.__module__ = "lln_lab.peers.bare"
    assert list(undocumented(Bare)) == ["other"]
