"""The program ``lln``: help and version appear at once, because torch is not loaded for them.

``import lln`` loads torch, which takes seconds: it registers operators, and makes the first calls
of vector functions before any thread is started. So the program has a module of its own.
"""

from __future__ import annotations

import sys
from importlib import metadata
from importlib.util import find_spec, module_from_spec
from typing import Any

_NEED_NO_TORCH = {"--help", "--version"}


def main() -> None:
    """Run the command line."""
    words = sys.argv[1:]
    # `python -m lln` has loaded it already.
    if "lln" not in sys.modules and (not words or _NEED_NO_TORCH.intersection(words)):
        _put_off_loading()
    from lln.cli import main as run

    run()


def _put_off_loading() -> None:
    """Let ``import lln`` load nothing until one of its names is asked for."""
    spec = find_spec("lln")
    assert spec is not None
    assert spec.loader is not None
    package, load = module_from_spec(spec), spec.loader.exec_module

    def find(name: str) -> Any:
        del package.__getattr__
        load(package)
        return getattr(package, name)

    vars(package).update(__version__=metadata.version("lln"), __getattr__=find)
    sys.modules["lln"] = package
