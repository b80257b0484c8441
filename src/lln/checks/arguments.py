"""Checks of the arguments that the entry points share; each refuses with one sentence.

Dimension legend: B batch, H heads, T queries, S keys, D head width, E value width.

Checks of shape and type always run and never synchronise with the device, so that they also work
under ``torch.compile`` and ``torch.export``. Checks of *values* (is α positive, do the bounds of
packed sequences increase) run on CPU tensors, and on other devices only if ``LLN_DEBUG=1`` is set
in the environment.
"""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from lln.checks.names import check_choice, shown
from lln.checks.tensors import (
    FLOAT_DTYPES,
    check_recorder,
    check_tensor,
    missing_axes,
    shape_of,
    wrong_device,
    wrong_dtype,
)
from lln.errors import InvalidInputError
from lln.tracing import is_compiling, values_are_readable

MATCHING_CRITERIA = ("variance", "entropy", "paper")
IMPLEMENTATIONS = ("auto", "eager", "cpu", "triton", "reference")


def check_qkv(
    query: Tensor, key: Tensor, value: Tensor, *, layout: str, enable_gqa: bool = False
) -> None:
    """Refuse query, key and value that do not fit together.

    Args:
        query: ``[B, H, T, D]`` (layout ``"dense"``) or ``[T, H, D]`` (layout ``"packed"``).
        key: The same with S tokens and possibly fewer heads.
        value: Like key, with width E.
        layout: ``"dense"`` or ``"packed"``.
        enable_gqa: Whether key and value may have fewer heads than query.
    """
    check_recorder()
    check_flag("enable_gqa", enable_gqa)
    rank, axes = (4, "[B, H, T, D]") if layout == "dense" else (3, "[T, H, D]")
    if _are_alike(query, key, value, rank):
        return
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if isinstance(tensor, Tensor) and tensor.is_nested:
            raise InvalidInputError(
                f"{name} is a nested tensor; pass its .values() and .offsets() to the _varlen form."
            )
        check_tensor(name, tensor)
        if tensor.dim() != rank:
            raise InvalidInputError(
                f"{name} must have {rank} dimensions {axes}, got shape {shape_of(tensor)}."
            )
        if tensor.dtype not in FLOAT_DTYPES:
            fix = f"; give {name}.dequantize()" if tensor.is_quantized else ""
            raise wrong_dtype(name, tensor.dtype, fix)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise InvalidInputError(
                f"query, key and value must share one dtype, got query {query.dtype} "
                f"and {name} {tensor.dtype}."
            )
        if tensor.device != query.device:
            raise InvalidInputError(
                f"query, key and value must be on one device, got query on {query.device} "
                f"and {name} on {tensor.device}."
            )
    if query.shape[-1] != key.shape[-1]:
        raise InvalidInputError(
            f"query and key must have the same head width, got {query.shape[-1]} and "
            f"{key.shape[-1]}."
        )
    if query.shape[-1] == 0:
        raise InvalidInputError("the head width of query and key must be at least 1, got 0.")
    for what, axis in (("tokens", 2 if layout == "dense" else 0), ("heads", 1)):
        if key.shape[axis] != value.shape[axis]:
            raise InvalidInputError(
                f"key and value must have the same number of {what}, got {key.shape[axis]} and "
                f"{value.shape[axis]}."
            )
    if layout == "dense":
        for name, tensor in (("key", key), ("value", value)):
            if tensor.shape[0] != query.shape[0]:
                raise InvalidInputError(
                    f"query and {name} must have the same batch size (it is never broadcast), "
                    f"got {query.shape[0]} and {tensor.shape[0]}."
                )
    elif query.shape[0] != key.shape[0]:
        raise InvalidInputError(
            f"packed query and key must have the same number of tokens, got {query.shape[0]} and "
            f"{key.shape[0]}."
        )
    _check_heads(query.shape[1], key.shape[1], enable_gqa)


def _are_alike(query: Tensor, key: Tensor, value: Tensor, rank: int) -> bool:
    """Whether a quick check is enough: the usual case, three tensors that are alike.

    A trace uses the full check, which compares no more sizes than necessary.
    """
    return (
        type(query) is type(key) is type(value) is Tensor
        and not is_compiling()
        # Nested tensors have no plain shape.
        and not (query.is_nested or key.is_nested or value.is_nested)
        and query.layout is key.layout is value.layout is torch.strided
        and query.shape == key.shape == value.shape
        and query.dtype == key.dtype == value.dtype
        and query.device == key.device == value.device
        and query.dtype in FLOAT_DTYPES
        and query.dim() == rank
        and query.shape[-1] > 0
    )


def _check_heads(query_heads: int, key_heads: int, enable_gqa: bool) -> None:
    if query_heads == key_heads:
        return
    grouped = key_heads > 0 and query_heads % key_heads == 0
    if not enable_gqa:
        fix = "pass enable_gqa=True for grouped-query attention"
        if not grouped:
            fix = "give key as many heads as query, or a divisor of it with enable_gqa=True"
        raise InvalidInputError(f"query has {query_heads} heads and key has {key_heads}; {fix}.")
    if not grouped:
        raise InvalidInputError(
            f"the number of query heads must be a multiple of the number of key heads, got "
            f"{query_heads} and {key_heads}."
        )


def check_key_mask(key_mask: Tensor | None, key: Tensor) -> None:
    """Refuse anything but a bool mask ``[B, S]``, True = attend."""
    if key_mask is None:
        return
    check_tensor("key_mask", key_mask, "a bool torch.Tensor")
    expected = (key.shape[0], key.shape[2])
    if key_mask.dim() != 2:
        raise InvalidInputError(
            f"key_mask must be [B, S] = {list(expected)}, got shape {shape_of(key_mask)}: linear "
            "attention never forms the N×N matrix, so only whole keys can be masked."
        )
    if key_mask.dtype != torch.bool:
        raise InvalidInputError(
            f"key_mask must be bool with True = attend, got {key_mask.dtype}; convert it with "
            "mask.bool() (or mask == 0 for an additive mask)."
        )
    if tuple(key_mask.shape) != expected:
        raise InvalidInputError(
            f"key_mask must be [B, S] = {list(expected)}, got {shape_of(key_mask)}."
        )
    if key_mask.device != key.device:
        raise wrong_device("key_mask", key_mask, key.device, "key")


def check_causal(is_causal: bool, query_tokens: int, key_tokens: int) -> None:
    """Refuse causal attention between sequences of different length."""
    check_flag("is_causal", is_causal)
    if is_causal and query_tokens != key_tokens:
        raise InvalidInputError(
            f"is_causal needs as many queries as keys, got T = {query_tokens} and S = "
            f"{key_tokens}; to continue after earlier tokens use lln.KeySummary."
        )


def check_matching(matching: str) -> None:
    """Refuse an unknown criterion of moment matching."""
    check_choice("matching", matching, MATCHING_CRITERIA)


def check_temperature(
    name: str, given: float | Tensor, batch: int, heads: tuple[int, ...], device: torch.device
) -> None:
    """Refuse an α or β that is not a positive number or does not broadcast to ``[B, H, 1, 1]``.

    ``batch`` is B, or the number of packed sequences; ``heads`` are the head counts it may have.
    """
    if type(given) is float and 0 < given < math.inf:
        return
    if isinstance(given, Tensor):
        check_per_head(name, given, batch, heads, device)
        if values_are_readable(given):
            # A few numbers: comparing them in PyTorch takes ten times as long.
            wrong = next((one for one in given.flatten().tolist() if not 0 < one < math.inf), None)
            if wrong is not None:
                raise InvalidInputError(
                    f"{name} must be positive and finite everywhere, got {wrong:g}."
                )
    elif isinstance(given, bool) or not isinstance(given, Real | torch.SymFloat | torch.SymInt):
        raise InvalidInputError(f"{name} must be a number or a tensor, got {type(given).__name__}.")
    elif isinstance(given, Real) and not (float(given) > 0 and math.isfinite(given)):
        raise InvalidInputError(f"{name} must be positive and finite, got {given}.")


def check_per_head(
    name: str, given: Tensor, batch: int, heads: tuple[int, ...], device: torch.device
) -> None:
    """Refuse a tensor of α, β or offsets by dtype, shape or device; as `check_temperature`."""
    check_tensor(name, given)
    if given.dtype not in FLOAT_DTYPES:
        raise wrong_dtype(name, given.dtype)
    sizes = (1,) * (4 - given.dim()) + tuple(given.shape)
    fits = (
        len(sizes) == 4
        and sizes[0] in (1, batch)
        and sizes[1] in (1, *heads)
        and sizes[2:] == (1, 1)
    )
    if not fits:
        leads = ((lead, 2) for one in heads for lead in ((one,), (batch, one)))
        raise InvalidInputError(
            f"{name} must be a number or broadcast to [B, H, 1, 1] = "
            f"[{batch}, {heads[0]}, 1, 1], got shape {shape_of(given)}"
            f"{missing_axes(name, given, leads)}."
        )
    if given.device != device and given.dim() > 0:
        raise wrong_device(name, given, device)


def check_blocks(block_size: int, scale: float | None) -> None:
    """Refuse an invalid block size or scale of the diagonal blocks."""
    check_block_size(block_size)
    check_scale(scale)


def check_block_size(block_size: int) -> None:
    """Refuse a block size that is not a positive integer."""
    if isinstance(block_size, bool) or not isinstance(block_size, int):
        raise InvalidInputError(
            f"block_size must be a positive integer, got {type(block_size).__name__}."
        )
    if block_size < 1:
        raise InvalidInputError(f"block_size must be at least 1, got {block_size}.")


def check_scale(scale: float | None) -> None:
    """Refuse a softmax scale that is zero or not finite."""
    if scale is None:
        return
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise InvalidInputError(f"scale must be a number, got {type(scale).__name__}.")
    if scale == 0 or not math.isfinite(scale):
        raise InvalidInputError(f"scale must be finite and not zero, got {scale}.")


def check_dropout(dropout_p: float) -> None:
    """Refuse a dropout probability outside ``[0, 1)``."""
    if type(dropout_p) is float and 0 <= dropout_p < 1:
        return
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, Real) or not 0 <= dropout_p < 1:
        raise InvalidInputError(f"dropout_p must be a number in [0, 1), got {shown(dropout_p)}.")


def check_flag(name: str, given: bool) -> None:
    """Refuse a switch that is neither True nor False."""
    if given is not True and given is not False:
        # The old ONNX exporter turns switches into tensors.
        check_recorder()
        raise InvalidInputError(f"{name} must be True or False, got {shown(given)}.")


def check_mix(mix: float | Tensor, out_shape: tuple[int, ...], device: torch.device) -> None:
    """Refuse a mix that is not in ``[0, 1]`` or does not broadcast to the output."""
    if isinstance(mix, Tensor):
        check_tensor("mix", mix)
        if not mix.dtype.is_floating_point:
            raise InvalidInputError(f"mix must be floating point, got {mix.dtype}.")
        if mix.device != device and mix.dim() > 0:
            raise wrong_device("mix", mix, device)
        sizes = (1,) * (len(out_shape) - mix.dim()) + tuple(mix.shape)
        if len(sizes) != len(out_shape) or any(
            size not in (1, out) for size, out in zip(sizes, out_shape, strict=True)
        ):
            # [B, H, T, E] of dense tensors, [T, H, E] of packed ones.
            leads = [(out_shape[1:2], len(out_shape) - 2), (out_shape[:1], len(out_shape) - 1)]
            leads += [(out_shape[:ended], len(out_shape) - ended) for ended in (2, 3)]
            raise InvalidInputError(
                f"mix must broadcast to the output {list(out_shape)}, got shape {shape_of(mix)}"
                f"{missing_axes('mix', mix, leads)}."
            )
    elif isinstance(mix, bool) or not isinstance(mix, Real) or not 0 <= mix <= 1:
        raise InvalidInputError(f"mix must be a number in [0, 1] or a tensor, got {shown(mix)}.")


def check_self_attention(query: Tensor, key: Tensor, what: str) -> None:
    """Refuse cross attention where a block pairs queries with the keys of the same positions."""
    if query.shape[-2] != key.shape[-2]:
        raise InvalidInputError(
            f"{what} pairs queries and keys of the same positions, got T = {query.shape[-2]} and "
            f"S = {key.shape[-2]}; use lln_attention for cross attention."
        )


def check_count(name: str, number: int, least: int = 1) -> None:
    """Refuse anything but an integer of at least ``least``."""
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        kind = f"{type(number).__name__} " if isinstance(number, str | float) else ""
        raise InvalidInputError(
            f"{name} must be an integer of at least {least}, got {kind}{shown(number)}."
        )


def check_impl(impl: str) -> None:
    """Refuse an unknown implementation by listing the known ones."""
    check_choice("impl", impl, IMPLEMENTATIONS)
