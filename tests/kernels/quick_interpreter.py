"""Triton's interpreter without half of its work.

Whenever a kernel calls a function, the interpreter replaces all of `triton.language` once more,
which the launch has done before: half of the time of these tests. Here it does so once per launch.
"""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any


def quicken() -> None:
    """Replace the language once per launch, if kernels are interpreted at all."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    language, replace = interpreter.tl, interpreter._patch_lang
    launch: Any = interpreter.GridExecutor
    run: Callable = launch.__call__
    replaced: set[int] = set()

    @functools.cache
    def modules_of(function: Callable) -> frozenset[int]:
        """What the interpreter looks for: the modules that a function knows the language by."""
        seen = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return frozenset(id(value) for value in seen if value in (language, language.core))

    def replace_once(function: Callable) -> Any:
        modules = modules_of(function)
        if modules and modules <= replaced:
            return None
        replaced.update(modules)
        return replace(function)

    def launch_anew(self: Any, *arguments: Any, **options: Any) -> Any:
        replaced.clear()
        try:
            return run(self, *arguments, **options)
        finally:
            replaced.clear()

    interpreter._patch_lang = replace_once
    launch.__call__ = launch_anew
