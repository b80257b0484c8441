"""Any input of an instrument as groups of heads of one length, with nothing masked.

Padded tokens are taken out, packed sequences are taken apart, grouped queries get their keys. What
is left are heads with a row-stochastic P. So no instrument has to know about masks, and nothing
under a mask, NaN included, can enter a measurement.

Dimension legend: B samples (or packed sequences), H query heads, Hk key heads, T queries, S keys,
D head width, G heads of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lln.eager.run import repeat_heads
from lln.functional import ways
from lln.functional.key_calls import complete
from lln.functional.match import with_temperatures
from lln.instruments.attention_inputs import AttentionInputs
from lln.instruments.chosen_keys import ChosenKeys, place_choices
from lln.instruments.unmasked_heads import UnmaskedHeads
from lln.precision import without_autocast

# Numbers of one group of samples: 32 MiB of queries in float64.
_GROUP = 1 << 22


class HeadGroup(NamedTuple):
    """Samples of equal length and their heads.

    Attributes:
        samples: The rows of the result they fill.
        heads: Their heads, sample by sample.
        healthy: bool ``[G]``, False where an input is not finite: those heads hold zeros instead.
    """

    samples: slice
    heads: UnmaskedHeads
    healthy: Tensor


def measure(inputs: AttentionInputs, statistic: Callable[[UnmaskedHeads], Tensor]) -> Tensor:
    """One number per head: ``[B, H]``; see `measure_all`."""
    (found,) = measure_all(inputs, lambda heads: (statistic(heads),), ((),))
    return found


def measure_all(
    inputs: AttentionInputs,
    statistics: Callable[[UnmaskedHeads], tuple[Tensor, ...]],
    shapes: tuple[tuple[int, ...], ...],
) -> tuple[Tensor, ...]:
    """Several numbers per head, ``[B, H, *shape]`` each, float64.

    NaN where there is nothing to measure: no valid token, or an input that is not finite.

    Args:
        inputs: Where the heads come from.
        statistics: Gets heads, returns tensors ``[G, *shape]``.
        shapes: The trailing shape of every result.
    """
    query_heads = inputs.query.shape[1]
    out = tuple(
        torch.full(
            (inputs.batch, query_heads, *shape),
            torch.nan,
            dtype=torch.float64,
            device=_home(inputs),
        )
        for shape in shapes
    )
    for group in head_groups(inputs):
        if group.heads.query.numel() == 0 or group.heads.key.numel() == 0:
            continue
        with torch.no_grad():
            found = statistics(group.heads)
        for whole, part in zip(out, found, strict=True):
            healthy = group.healthy.reshape(-1, *(1 for _ in part.shape[1:]))
            part = torch.where(healthy, part.to(whole), torch.nan)
            whole[group.samples] = part.unflatten(0, (-1, query_heads))
    return out


def head_groups(inputs: AttentionInputs) -> Iterator[HeadGroup]:
    """All heads, in groups of samples of equal length."""
    home, query_heads = _home(inputs), inputs.query.shape[1]
    query, key = inputs.query.detach().to(home), inputs.key.detach().to(home)
    mix = _as_double(inputs.mix, home).expand(*query.shape[:-1], 1)
    choice = _Choice(inputs, home) if inputs.kind == "lln_keys" else None
    alpha, beta = _temperatures(inputs, home) if choice is None else choice.temperatures
    scale = 1 / math.sqrt(query.shape[-1]) if inputs.scale is None else float(inputs.scale)

    def group(
        at: slice, q: Tensor, k: Tensor, m: Tensor, places: Tensor, block: int = 0
    ) -> HeadGroup:
        """Samples ``[b, H, …]`` with the places of their keys and the number of their block."""
        q, k = q.double().flatten(0, 1), repeat_heads(k.double(), query_heads).flatten(0, 1)
        a, b = alpha[at].flatten(0, 1), beta[at].flatten(0, 1)
        chosen = None if choice is None else choice.of_samples(at, places, block)
        healthy = q.isfinite().all(-1).all(-1) & k.isfinite().all(-1).all(-1)
        healthy &= (a.isfinite() & b.isfinite()).flatten()
        if chosen is not None:
            healthy &= chosen.offset.isfinite().flatten()
            offset = torch.where(healthy[:, None, None], chosen.offset, 0.0)
            chosen = replace(chosen, offset=offset)
        calm = healthy[:, None, None]
        q, k = torch.where(calm, q, 0.0), torch.where(calm, k, 0.0)
        a, b = torch.where(calm, a, 1.0), torch.where(calm, b, 1.0)
        blocks, window = (places - places[:1]) // inputs.tokens_in_block, 0
        if inputs.kind == "window":
            blocks, window = places, inputs.window
        options = (inputs.kind, scale, inputs.is_causal)
        heads = UnmaskedHeads(q, k, *options, a, b, m.flatten(0, 1), blocks, chosen, window)
        return HeadGroup(at, heads, healthy)

    if inputs.cu_seqlens is not None:
        block = 0
        for index, (start, end) in enumerate(pairwise(inputs.cu_seqlens.tolist())):
            q, k, m = (side[start:end].transpose(0, 1)[None] for side in (query, key, mix))
            places = torch.arange(start, end, device=home)
            yield group(slice(index, index + 1), q, k, m, places, block)
            block += -(-(end - start) // inputs.tokens_in_block)
        return
    mask, place = inputs.key_mask, torch.arange(key.shape[2], device=home)
    if mask is None or bool(mask.all()):
        tokens = max(query.shape[2], key.shape[2], 1)
        step = max(_GROUP // (tokens * max(query_heads, 1) * query.shape[-1]), 1)
        for start in range(0, inputs.batch, step):
            at = slice(start, start + step)
            yield group(at, query[at], key[at], mix[at], place)
        return
    for index in range(inputs.batch):
        at, valid = slice(index, index + 1), place[mask[index].to(home)]
        q, k, m = query[at], key[at, :, valid], mix[at]
        if inputs.is_square:
            # As in the attention functions, the mask says which queries count, too.
            q, m = q[:, :, valid], m[:, :, valid]
        # Blocks are counted from the first valid token, wherever it is.
        first = int(valid[0]) if valid.shape[0] else 0
        yield group(at, q, k, m, valid, -(-first // inputs.tokens_in_block))


class _Choice:
    """What `lln.lln_keys_attention` would match and choose for some inputs, and has been given."""

    def __init__(self, inputs: AttentionInputs, device: torch.device) -> None:
        self.inputs = inputs
        key = inputs.key.detach()
        fitted = {"block_size": inputs.tokens_in_block, "group_size": inputs.queries_in_group}
        call = inputs.call.replace(query=inputs.query.detach(), key=key, value=key, **fitted)
        with without_autocast(inputs.query), torch.no_grad():
            call = complete(call, ways.prepare(call, "auto").impl)
        sizes = (inputs.batch, inputs.query.shape[1], device)
        self.temperatures = per_head(call.alpha, *sizes), per_head(call.beta, *sizes)
        self.offset = per_head(call.offset, *sizes)
        self.indices = call.keys.to(device).long()

    def of_samples(self, at: slice, places: Tensor, block: int) -> ChosenKeys:
        """Those of some samples, whose tokens at ``places`` count and begin with a block."""
        inputs, size = self.inputs, self.inputs.queries_in_group
        packed = inputs.cu_seqlens is not None
        return place_choices(
            self.indices if packed else self.indices[at].flatten(0, 1),
            self.offset[at].flatten(0, 1),
            places,
            first_group=block * (inputs.tokens_in_block // size),
            group_size=size,
            block_size=inputs.tokens_in_block,
        )


def _home(inputs: AttentionInputs) -> torch.device:
    """Where to measure: Metal has no float64."""
    device = inputs.query.device
    return torch.device("cpu") if device.type == "mps" else device


def _temperatures(inputs: AttentionInputs, device: torch.device) -> tuple[Tensor, Tensor]:
    """α and β as float64 ``[B, H, 1, 1]``, matched as `lln.lln_attention` does if not given."""
    alpha, beta = inputs.alpha, inputs.beta
    if inputs.kind not in ("lln", "lln_diag"):
        alpha = beta = 1.0
    elif alpha is None or beta is None:
        call, impl = inputs.call, "eager"
        with without_autocast(inputs.query), torch.no_grad():
            if inputs.cu_seqlens is None:
                impl = ways.prepare(call.replace(kind="temperatures"), "auto").impl
            call = with_temperatures(call, impl)
        alpha, beta = call.alpha, call.beta
    sizes = (inputs.batch, inputs.query.shape[1], device)
    return per_head(alpha, *sizes), per_head(beta, *sizes)


def per_head(side: float | Tensor, batch: int, heads: int, device: torch.device) -> Tensor:
    """α, β or the offset as float64 ``[B, H, 1, 1]``."""
    side = _as_double(side, device)
    side = side.reshape((1,) * (4 - side.dim()) + tuple(side.shape))
    if side.shape[1] not in (1, heads):
        side = repeat_heads(side, heads)
    return side.expand(batch, heads, 1, 1)


def _as_double(number: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        return number.detach().to(device).double()
    return torch.tensor(number, dtype=torch.float64, device=device)
