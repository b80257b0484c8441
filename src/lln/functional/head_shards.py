"""Tensor parallelism: attention of a ``DTensor`` whose heads or samples lie on several ranks.

Neither heads nor samples depend on each other, so every rank computes its own, nothing travels, and
the output lies where the queries lie. α, β, offset and mix may be plain tensors that all ranks hold
or DTensors; each rank takes its part, and gradients of what several ranks share are added up.
Tokens on several ranks are another matter: `lln.parallel`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lln.checks.call import Call
from lln.errors import InvalidInputError

# Axes of heads and samples, counted from the end, of what a call holds.
_OF_TOKENS = ("query", "key", "value", "mix", "choice_query", "choice_key")
_OF_HEADS = ("alpha", "beta", "offset", "keys")
_DENSE = {**dict.fromkeys((*_OF_TOKENS, *_OF_HEADS), (-3, -4)), "key_mask": (None, -2)}
# Packed sequences are one after the other in the place of samples and are not divided.
_PACKED = {
    **dict.fromkeys(_OF_TOKENS, (-2, None)),
    **dict.fromkeys(_OF_HEADS, (-3, None)),
    "bounds": (None, None),
}


def on_own_shards(call: Call, attend: Callable[[Call], Tensor]) -> Tensor:
    """The attention of this rank's heads and samples, as a ``DTensor``.

    Args:
        call: A checked call whose query is a ``DTensor``.
        attend: Computes a call of ordinary tensors.

    Raises:
        InvalidInputError: If tokens or channels are divided, or key and value lie elsewhere.
    """
    from torch.distributed.tensor import DTensor

    query: Any = call.query
    axes = _DENSE if call.bounds is None else _PACKED
    divided = [_divided(placement, query, axes["query"]) for placement in query.placements]
    _check(call, query, divided)
    own = {
        name: _own_part(getattr(call, name), name, query, divided, places)
        for name, places in axes.items()
    }
    out = attend(call.replace(**own))
    shape = torch.Size((*query.shape[:-1], call.value.shape[-1]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        out, query.device_mesh, query.placements, run_check=False, shape=shape, stride=stride
    )


def _divided(placement: Any, query: Any, axes: tuple[int | None, int | None]) -> int | None:
    """Which of ``(heads, samples)`` an axis of the mesh divides; None = nothing."""
    if placement.is_replicate():
        return None
    if placement.is_shard():
        axis = placement.dim - query.dim() if placement.dim >= 0 else placement.dim
        if axis in axes:
            return axes.index(axis)
    raise InvalidInputError(
        f"attention of a DTensor takes heads or samples on several ranks, got {placement} for a "
        f"query of shape {list(query.shape)}; redistribute it, or use lln.parallel for tokens, "
        "with to_local() of every side."
    )


def _check(call: Call, query: Any, divided: list[int | None]) -> None:
    from torch.distributed.tensor import DTensor

    for name in ("key", "value"):
        side: Any = getattr(call, name)
        if not isinstance(side, DTensor) or side.placements != query.placements:
            found = list(side.placements) if isinstance(side, DTensor) else "an ordinary tensor"
            raise InvalidInputError(
                f"{name} must be a DTensor placed as query, {list(query.placements)}, got {found}."
            )
    heads, key_heads = query.shape[-3], call.key.shape[-3]
    if call.bounds is not None:
        heads, key_heads = query.shape[-2], call.key.shape[-2]
    for ranks, part in zip(query.device_mesh.shape, divided, strict=True):
        if part == 0 and heads != key_heads and key_heads % ranks:
            raise InvalidInputError(
                f"{key_heads} key heads cannot be divided between {ranks} ranks; repeat them, or "
                "use fewer ranks."
            )
    takes_all = call.matching == "paper" and call.alpha is None and call.has_temperatures
    if takes_all and any(part is not None for part in divided):
        raise InvalidInputError(
            "matching='paper' takes one statistic of the whole tensor, which lies on several "
            "ranks; use matching='variance', or give alpha and beta."
        )


def _own_part(
    side: Any, name: str, query: Any, divided: list[int | None], axes: tuple[int | None, int | None]
) -> Any:
    """This rank's part of an argument, with gradients that flow back to the whole."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    if not isinstance(side, Tensor):
        return side
    mesh, wanted, of_gradient = query.device_mesh, [], []
    for part in divided:
        axis = None if part is None else axes[part]
        is_cut = axis is not None and side.dim() >= -axis and side.shape[axis] > 1
        wanted.append(Shard(side.dim() + axis) if is_cut and axis is not None else Replicate())
        # What every rank uses whole gets a share of its gradient from each.
        of_gradient.append(wanted[-1] if is_cut or part is None else Partial())
    if not isinstance(side, DTensor):
        side = DTensor.from_local(side, mesh, [Replicate()] * mesh.ndim, run_check=False)
    elif side.device_mesh != mesh:
        raise InvalidInputError(f"{name} must be a DTensor on the mesh of query, got another mesh.")
    if list(side.placements) != wanted:
        side = side.redistribute(mesh, wanted)
    return side.to_local(grad_placements=of_gradient)
