"""Show docstrings as `help` does; griffe, which reads the source, calls this."""

import importlib
import inspect
from typing import Any

import griffe


class AsInHelp(griffe.Extension):
    """Corrects what cannot be read off the source."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called with every module, class, function and attribute."""
        if not obj.docstring:
            return
        if obj.is_function and any(str(d.value).startswith("instrument(") for d in obj.decorators):
            # The decorator gives the instruments their common arguments.
            function = getattr(importlib.import_module(obj.module.path), obj.name)
            obj.docstring.value = inspect.getdoc(function)
            given = inspect.signature(function).parameters.values()
            obj.parameters = griffe.Parameters(*map(_parameter, given))
        # griffe knows the plural only.
        obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")


def _parameter(one: inspect.Parameter) -> griffe.Parameter:
    default = None if one.default is one.empty else repr(one.default)
    kind = griffe.ParameterKind[one.kind.name.lower()]
    return griffe.Parameter(one.name, annotation=one.annotation, kind=kind, default=default)
