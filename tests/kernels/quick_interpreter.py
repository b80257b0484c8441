"""Triton's interpreter without most of its work, and with the same results.

It spends its time on types: it replaces all of `triton.language` once per call of a function,
builds every shape anew for every number, and looks for overflows that it does not tell. Here the
language is replaced once per launch, what depends on a type alone is found once per type, and
nothing looks for overflows.
"""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any


def quicken() -> None:
    """Let the interpreter work quickly, if kernels are interpreted at all."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    _replace_the_language_once(interpreter)
    _remember_types(interpreter)
    # Of integers; it computes them and then says nothing, because assertions are off.
    type(interpreter.interpreter_semantic).binary_op_sanitize_overflow_impl = lambda *given: None


def _replace_the_language_once(interpreter: Any) -> None:
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


def _remember_types(interpreter: Any) -> None:
    """Blocks of a type and a shape, and what tensors have of them, are made once."""
    core = interpreter.tl.core
    block, tensor, dtype = core.block_type, core.tensor, core.dtype
    semantic = type(interpreter.interpreter_semantic)
    make_block, make_tensor, is_equal = block.__init__, tensor.__init__, dtype.__eq__
    find_numpy_type, broadcast = interpreter._get_np_dtype, semantic.broadcast_impl_value
    # By the identity of their types, which are kept by what is remembered.
    blocks: dict[Any, dict] = {}
    shapes: dict[tuple, Any] = {}
    tensors: dict[Any, tuple] = {}
    numpy_types: dict[str, Any] = {}

    def remembered_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = id(element_ty), *shape
        if key not in blocks:
            make_block(self, element_ty, shape)
            self.shape = shapes.setdefault(tuple(self.shape), self.shape)
            blocks[key] = self.__dict__
        self.__dict__ = blocks[key]

    def remembered_tensor(self: Any, handle: Any, type: Any) -> None:
        key = id(type.__dict__)
        if key not in tensors:
            make_tensor(self, handle, type)
            tensors[key] = self.shape, self.numel, type
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel, _ = tensors[key]

    def numpy_type(type: Any) -> Any:
        name = type.scalar.name
        if name not in numpy_types:
            numpy_types[name] = find_numpy_type(type)
        return numpy_types[name]

    def broadcast_others(self: Any, left: Any, right: Any) -> Any:
        # Scalars have no shape.
        if getattr(left.type, "shape", None) is getattr(right.type, "shape", None):
            return left, right
        return broadcast(self, left, right)

    block.__init__, tensor.__init__ = remembered_block, remembered_tensor
    dtype.__eq__ = lambda self, other: self is other or is_equal(self, other)
    interpreter._get_np_dtype = numpy_type
    semantic.broadcast_impl_value = broadcast_others
