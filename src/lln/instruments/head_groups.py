"""Any input of an instrument as groups of heads of one length, with nothing masked.

Padded tokens are taken out, packed sequences are taken apart, grouped queries get their keys: what
is left are heads whose P is row-stochastic, so no instrument has to know about masks, and nothing
under a mask, NaN included, can enter a measurement.

Dimension legend: B samples (or packed sequences), H query heads, Hk key heads, T queries, S keys,
D head width, G heads of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from lln import checks
from lln.checks.names import check_choice
from lln.checks.packed import check_cu_seqlens
from lln.eager.run import repeat_heads
from lln.errors import InvalidInputError
from lln.functional.match import match_inputs
from lln.functional.plan import choose_implementation
from lln.matching.moments import packed_moments, temperatures
from lln.precision import without_autocast

KINDS = ("softmax", "lln", "diag", "lln_diag")

# Numbers of one group of samples: 32 MiB of queries in float64.
_GROUP = 1 << 22


@dataclass(frozen=True)
class Heads:
    """Heads of one length without masks, in float64, detached.

    Attributes:
        query: ``[G, T, D]``.
        key: ``[G, S, D]``.
        kind: One of `KINDS`.
        scale: Factor of the softmax scores.
        is_causal: Whether row i sees keys 0 … i only.
        alpha: ``[G, 1, 1]``; 1 where the kind has none.
        beta: Likewise.
        mix: ``[G, T, 1]``, the LLN part's weight.
        block: int ``[S]``, never decreasing: the diagonal block of every token.
    """

    query: Tensor
    key: Tensor
    kind: str
    scale: float
    is_causal: bool
    alpha: Tensor
    beta: Tensor
    mix: Tensor
    block: Tensor

    def part(self, start: int, end: int) -> Heads:
        """The heads from ``start`` up to ``end``."""
        names = ("query", "key", "alpha", "beta", "mix")
        return replace(self, **{name: getattr(self, name)[start:end] for name in names})


@dataclass(frozen=True)
class Group:
    """Samples of equal length and their heads.

    Attributes:
        samples: The rows of the result they fill.
        heads: Their heads, sample by sample.
        healthy: bool ``[G]``, False where an input is not finite: those heads hold zeros instead.
    """

    samples: slice
    heads: Heads
    healthy: Tensor


@dataclass(frozen=True)
class Selection:
    """What an instrument has to measure; made by `select`."""

    batch: int
    query_heads: int
    device: torch.device
    groups: Callable[[], Iterator[Group]]

    def measure(self, instrument: Callable[[Heads], Tensor]) -> Tensor:
        """One number a head: ``[B, H]``; see `measure_all`."""
        (found,) = self.measure_all(lambda heads: (instrument(heads),), ((),))
        return found

    def measure_all(
        self, instrument: Callable[[Heads], tuple[Tensor, ...]], shapes: tuple[tuple[int, ...], ...]
    ) -> tuple[Tensor, ...]:
        """Every result of an instrument, ``[B, H, *shape]`` each, float64.

        NaN where there is nothing to measure: no valid token, or an input that is not finite.

        Args:
            instrument: Gets heads, returns tensors ``[G, *shape]``.
            shapes: The trailing shape of every result.
        """
        lead = (self.batch, self.query_heads)
        out = tuple(
            torch.full((*lead, *shape), torch.nan, dtype=torch.float64, device=self.device)
            for shape in shapes
        )
        for group in self.groups():
            if group.heads.query.numel() == 0 or group.heads.key.numel() == 0:
                continue
            with torch.no_grad():
                found = instrument(group.heads)
            for whole, part in zip(out, found, strict=True):
                healthy = group.healthy.reshape(-1, *(1 for _ in part.shape[1:]))
                part = torch.where(healthy, part.to(whole), torch.nan)
                whole[group.samples] = part.unflatten(0, (-1, self.query_heads))
        return out


def select(
    query: Tensor,
    key: Tensor,
    *,
    kind: str,
    alpha: float | Tensor | None,
    beta: float | Tensor | None,
    matching: str,
    block_size: int | None,
    mix: float | Tensor,
    key_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    cu_seqlens: Tensor | None,
) -> Selection:
    """Check the arguments of an instrument and find α and β as `lln.lln_attention` does.

    The arguments are those of `lln.instruments.entropy`.
    """
    packed = cu_seqlens is not None
    checks.check_qkv(query, key, key, layout="packed" if packed else "dense", enable_gqa=True)
    check_choice("kind", kind, KINDS)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, query.shape[0], query.device)
        if key_mask is not None:
            raise InvalidInputError(
                "key_mask and cu_seqlens cannot be combined: packed sequences carry no padding; "
                "drop the masked tokens before packing."
            )
        batch, query_heads = cu_seqlens.shape[0] - 1, query.shape[1]
        rows = (query.shape[0], query_heads, 1)
    else:
        checks.check_key_mask(key_mask, key)
        batch, query_heads = query.shape[:2]
        rows = (*query.shape[:3], 1)
        checks.check_causal(is_causal, query.shape[2], key.shape[2])
        if kind in ("diag", "lln_diag"):
            checks.check_self_attention(query, key, f"kind {kind!r}")
    block_size = query.shape[-1] if block_size is None else block_size
    checks.check_block_size(block_size)
    checks.check_scale(scale)
    checks.check_mix(mix, rows, query.device)
    # Metal has no float64.
    home = torch.device("cpu") if query.device.type == "mps" else query.device
    mix = _as_double(mix, home)
    if not bool(((mix >= 0) & (mix <= 1)).all()):
        raise InvalidInputError("mix must lie in [0, 1] everywhere for P to be row-stochastic.")
    if kind in ("lln", "lln_diag"):
        checks.check_options(
            query,
            key,
            batch,
            alpha=alpha,
            beta=beta,
            matching=matching,
            dropout_p=0.0,
            is_causal=is_causal,
        )
        if alpha is None or beta is None:
            with without_autocast(query), torch.no_grad():
                alpha, beta = _match(query, key, matching, key_mask, cu_seqlens)
    else:
        alpha = beta = 1.0
    alpha, beta = (_per_head(side, batch, query_heads, home) for side in (alpha, beta))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    query, key, mix = query.detach().to(home), key.detach().to(home), mix.expand(rows)

    def group(at: slice, q: Tensor, k: Tensor, m: Tensor, place: Tensor) -> Group:
        """Samples ``[b, H, …]`` whose keys stand at these places, counted from the first."""
        q, k = q.double().flatten(0, 1), repeat_heads(k.double(), query_heads).flatten(0, 1)
        a, b = alpha[at].flatten(0, 1), beta[at].flatten(0, 1)
        healthy = q.isfinite().all(-1).all(-1) & k.isfinite().all(-1).all(-1)
        healthy &= (a.isfinite() & b.isfinite()).flatten()
        calm = healthy[:, None, None]
        q, k = torch.where(calm, q, 0.0), torch.where(calm, k, 0.0)
        a, b = torch.where(calm, a, 1.0), torch.where(calm, b, 1.0)
        block = place // block_size
        return Group(at, Heads(q, k, kind, scale, is_causal, a, b, m.flatten(0, 1), block), healthy)

    def sequences(bounds: list[int]) -> Iterator[Group]:
        for index, (start, end) in enumerate(pairwise(bounds)):
            place = torch.arange(end - start, device=home)
            q, k, m = (side[start:end].transpose(0, 1)[None] for side in (query, key, mix))
            yield group(slice(index, index + 1), q, k, m, place)

    def samples() -> Iterator[Group]:
        place = torch.arange(key.shape[2], device=home)
        if key_mask is None or bool(key_mask.all()):
            tokens = max(query.shape[2], key.shape[2], 1)
            step = max(_GROUP // (tokens * max(query_heads, 1) * query.shape[-1]), 1)
            for start in range(0, batch, step):
                at = slice(start, start + step)
                yield group(at, query[at], key[at], mix[at], place)
            return
        for index in range(batch):
            at, valid = slice(index, index + 1), place[key_mask[index].to(home)]
            q, k, m = query[at], key[at, :, valid], mix[at]
            if query.shape[2] == key.shape[2]:
                # As in the attention functions, the mask says which queries count, too.
                q, m = q[:, :, valid], m[:, :, valid]
            yield group(at, q, k, m, valid - valid[:1])

    if cu_seqlens is None:
        return Selection(batch, query_heads, home, samples)
    bounds = [int(bound) for bound in cu_seqlens.tolist()]
    return Selection(batch, query_heads, home, lambda: sequences(bounds))


def _match(
    query: Tensor,
    key: Tensor,
    matching: str,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if cu_seqlens is None:
        impl = choose_implementation("auto", query)
        return match_inputs(query, key, matching, key_mask, impl)
    moments = packed_moments(query, key, cu_seqlens.long(), centred=matching == "paper")
    return temperatures(moments, query.shape[-1], matching)


def _per_head(side: float | Tensor, batch: int, heads: int, device: torch.device) -> Tensor:
    """A temperature as float64 ``[B, H, 1, 1]``."""
    side = _as_double(side, device)
    side = side.reshape((1,) * (4 - side.dim()) + tuple(side.shape))
    if side.shape[1] not in (1, heads):
        side = repeat_heads(side, heads)
    return side.expand(batch, heads, 1, 1)


def _as_double(number: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        return number.detach().to(device).double()
    return torch.tensor(number, dtype=torch.float64, device=device)
