"""The statistics of moment matching, and α and β from them: from tensors to kernels.

Dimension legend: see `lln.kernels.moments.triton_moments`.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from lln.kernels.launching.kernel_arguments import mask_bytes, strides_of
from lln.kernels.launching.recipes import Recipe, Step, Workspace, launch_cached, over_tiles
from lln.kernels.launching.shapes import layout_of
from lln.kernels.launching.sizes import Sizes, choose_sizes
from lln.kernels.launching.stretches import cdiv
from lln.kernels.moments.triton_moments import measure_kernel, temperature_kernel
from lln.matching.curves import SPREAD_FLOOR, Curve

# α, β, σq², σk², whether a spread is zero: what the second kernel writes for every head.
_RESULTS = 5
# The curve's numbers, in the order in which `Curve` has them.
_CURVE = (
    *("c0", "c1", "c2", "c3", "c4", "x0", "x1", "x2", "x3"),
    *("least_p", "most_p", "least_n", "most_n"),
)


def match(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    bounds: Tensor | None,
    curve: Curve,
    longest: int,
) -> Tensor:
    """α, β, σq², σk² and whether the head is degenerate: ``[5, B, H, 1, 1]`` in float32.

    Query is ``[B, H, T, D]``, key ``[B, Hk, S, D]`` with its mask bool ``[B, S]``; packed sequences
    come as one sample with bounds ``[n + 1]``, and the longest of them has ``longest`` tokens (0 =
    not packed). The curve is the fitted one at this head width.
    """
    samples = query.shape[0] if bounds is None else bounds.shape[0] - 1
    heads = query.shape[1]
    shape = (_RESULTS, samples, heads, 1, 1)
    results = torch.empty(shape, dtype=torch.float32, device=query.device)
    if results.numel() == 0:
        return results
    if key.shape[1] == 0 or query.shape[2] == 0 or key.shape[2] == 0:
        results[:2], results[2:4], results[4] = 1.0, 0.0, 1.0
        return results
    byte_mask = mask_bytes(mask, query)
    runtime = {
        "p_q": query,
        "p_k": key,
        "p_mask": byte_mask,
        "p_starts": query if bounds is None else bounds,
        "p_results": results,
    }
    kind = kind_of(query, key, mask, curve, bounds, longest)
    family = ("match", query.device, query.dtype, query.shape[-1])
    masked, packed = mask is not None, bounds is not None

    def write(chosen: Sizes) -> Recipe:
        (tokens, width), (key_heads, keys) = query.shape[2:], key.shape[1:3]
        most, rows = longest or max(tokens, keys), samples * (heads + key_heads)
        tile = chosen.measure
        stretch = tile.stretch(most, tile.tokens, rows, chosen.cores)
        splits = cdiv(most, stretch)
        values = {
            "B": samples,
            "T": tokens,
            "S": keys,
            "H": heads,
            "HK": key_heads,
            "heads_in_all": samples * heads,
            "program_tokens": stretch,
            "splits": splits,
            "floor": SPREAD_FLOOR**2,
            "D": width,
            "BD": chosen.width,
            "HAS_MASK": masked,
            "QUERY_MASK": masked and tokens == keys,
            "PACKED": packed,
            "R": heads // key_heads,
            # A packed sequence has as many queries as keys, and a mask of T = S tokens counts both.
            "ALL_QUERIES": not packed and not (masked and tokens == keys),
            **strides_of(packed, p_q=query, p_k=key),
            **dict(zip(_CURVE, (number for part in curve for number in part), strict=True)),
        }
        measure = over_tiles(measure_kernel, (splits, rows), values, tile)
        finish = Step(temperature_kernel, (samples * heads,), values, 1)
        part = (samples * key_heads, splits)
        workspace: Workspace = {
            "p_squares": ((samples * heads, splits), torch.float32),
            "p_counts": (part, torch.float32),
            "p_means": ((*part, chosen.width), torch.float32),
            "p_spreads": ((*part, chosen.width), torch.float32),
        }
        return Recipe([measure, finish], workspace)

    def choose() -> Sizes:
        return choose_sizes(query, key, key, samples, key.shape[1], 0, longest)

    launch_cached(kind, family, runtime, query.device, choose, write)
    return results


def kind_of(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    curve: Curve,
    bounds: Tensor | None = None,
    longest: int = 0,
) -> Hashable:
    """What decides the launches of `match`."""
    layouts = tuple(layout_of(tensor) for tensor in (query, key, mask_bytes(mask, query)))
    packed = None if bounds is None else (bounds.shape[0], bounds.dtype)
    return "match", layouts, query.device, mask is None, packed, curve, longest
