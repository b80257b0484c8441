"""The registry of operations: ours, their compiled eager forms, and their rivals.

Dimension legend: B batch, H heads, N tokens, D head width.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import lln
from lln_lab.bench.cases import (
    DECODE,
    DENSE,
    PACKED,
    POSITIVE_TOKENS_FIRST,
    TOKENS_FIRST,
    Case,
    Layout,
)

# Matched values for unit-variance inputs at D = 64; the number does not affect the time.
ALPHA = BETA = 2.27


def _as_they_are(*inputs: Tensor) -> tuple[Any, ...]:
    return inputs


def _nothing_missing() -> str | None:
    return None


@dataclass(frozen=True)
class Operation:
    """An attention function, its references, and what it is compared with.

    Attributes:
        label: The name in tables and figures.
        run: The function that is timed; takes what ``prepare`` returns.
        exact: The same by its definition, N×N; called with float64 inputs.
        plain: The same in plain PyTorch, in the dtype of its inputs: its error tells how large an
            error to expect.
        kind: ``"softmax"``, ``"lln"`` or ``"linear"``.
        group: Operations of one group do the same job and are compared with each other.
        linear: Whether ``plain`` is linear in N, so that in float64 it can check any length.
        layout: Shapes and values of the inputs.
        prepare: Inputs → arguments of ``run``; not timed.
        units: Fewest tensors of the inputs' size that must move: forward, forward + backward.
        least_bytes: Fewest bytes that must move, where units do not fit.
        compiled: Name of the operation that is this one's eager form under ``torch.compile``.
        forward_only: Whether there is no backward to time.
        is_compiled: Whether ``run`` goes through ``torch.compile``.
        missing: Returns what the operation lacks here, in words; None = it can run.
    """

    label: str
    run: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    kind: str
    group: str = "bidirectional"
    linear: bool = True
    layout: Layout = DENSE
    prepare: Callable[..., tuple[Any, ...]] = _as_they_are
    units: tuple[int, int] | None = None
    least_bytes: Callable[[Case], int] | None = None
    compiled: str | None = None
    forward_only: bool = False
    is_compiled: bool = False
    missing: Callable[[], str | None] = _nothing_missing

    def floor_bytes(self, case: Case) -> int | None:
        """Fewest bytes that must move through memory; None where that is not known."""
        if self.least_bytes is not None:
            return self.least_bytes(case)
        return None if self.units is None else self.units[case.backward] * case.unit_bytes


def _softmax_plain(query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> Tensor:
    scores = (query @ key.mT) * query.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ value


def _softmax_exact(query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> Tensor:
    keep = lln.reference.causal_keep(query.shape[-2], query.device) if causal else None
    return lln.reference.softmax_attention(query, key, value, keep=keep)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, causal: bool, backend: str | None) -> Tensor:
    if backend is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    with sdpa_kernel(getattr(SDPBackend, backend)):
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)


def _softmax(label: str, backend: str | None, causal: bool = False) -> Operation:
    return Operation(
        f"{label}, causal" if causal else label,
        partial(_sdpa, causal=causal, backend=backend),
        partial(_softmax_exact, causal=causal),
        partial(_softmax_plain, causal=causal),
        kind="softmax",
        group="causal" if causal else "bidirectional",
        linear=False,
    )


def _lln(label: str, units: tuple[int, int], attend: Callable[..., Tensor]) -> Operation:
    return Operation(
        label,
        attend,
        partial(attend, impl="reference"),
        partial(attend, impl="eager"),
        kind="lln",
        units=units,
    )


_given = partial(lln.lln_attention, alpha=ALPHA, beta=BETA)
_given_diag = partial(lln.lln_diag_attention, alpha=ALPHA, beta=BETA)
_given_causal = partial(_given, is_causal=True)
_LLN = _lln("LLN", (4, 11), _given)
_LLN_DIAG = _lln("LLN + Diag", (6, 15), _given_diag)


# Tokens in a block of the diagonal part alone.
BLOCK = 64


def _diag_sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Blocks as heads of short sequences, without a copy; the short last block separately."""
    whole = query.shape[2] - query.shape[2] % BLOCK
    parts = []
    for start, end, size in ((0, whole, BLOCK), (whole, query.shape[2], query.shape[2] - whole)):
        if end > start:
            q, k, v = (
                side[:, :, start:end].unflatten(2, (-1, size)).flatten(0, 1)
                for side in (query, key, value)
            )
            out = F.scaled_dot_product_attention(q, k, v)
            parts.append(out.unflatten(0, query.shape[:2]).flatten(2, 3))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


_DIAG = replace(
    _lln("Diag alone", (4, 11), partial(lln.block_diagonal_attention, block_size=BLOCK)),
    group="diagonal",
)


def _compile(operation: Operation) -> Operation:
    """The eager form under ``torch.compile``, compiled again for every case."""

    def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return operation.plain(query, key, value)

    @cache
    def compiled() -> Callable[..., Tensor]:
        # Made at first use: the compiler takes seconds to import.
        return torch.compile(eager, dynamic=False)

    last: list[Any] = []

    def prepare(*inputs: Tensor) -> tuple[Any, ...]:
        this = [(one.shape, one.dtype, one.requires_grad) for one in inputs]
        if this != last:
            # Reset, because after eight shapes of one function the compiler falls back to eager.
            torch.compiler.reset()
            last[:] = this
        return inputs

    return replace(
        operation,
        label=f"{operation.label}, eager form compiled",
        run=lambda *inputs: compiled()(*inputs),
        prepare=prepare,
        is_compiled=True,
    )


def _packed_lln(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    longest: int | None = None,
    impl: str = "auto",
) -> Tensor:
    return lln.lln_attention_varlen(
        query, key, value, ends, max_seqlen=longest, alpha=ALPHA, beta=BETA, impl=impl
    )


def _with_longest(query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> tuple[Any, ...]:
    return query, key, value, ends, int(ends.diff().max())


def _by_sequence(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, ends: Tensor
) -> Tensor:
    """Attention ``[T, H, D]`` of packed sequences, one call per sequence."""
    parts = [
        attend(*(side[start:end].transpose(0, 1) for side in (query, key, value)))
        for start, end in pairwise(ends.tolist())
    ]
    return torch.cat(parts, dim=1).transpose(0, 1)


def _flash_packed(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(query, key, value, ends, ends, longest, longest)
    return out if isinstance(out, Tensor) else out[0]


def _whole(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *old: Tensor
) -> Tensor:
    """One query over the earlier keys and values and its own."""
    return attend(query, torch.cat((old[0], key), -2), torch.cat((old[1], value), -2))


def _summarised(
    query: Tensor, key: Tensor, value: Tensor, old_key: Tensor, old_value: Tensor
) -> tuple[Any, ...]:
    summary = lln.KeySummary.of(old_key, old_value, BETA)
    return query, key, value, summary.log_mass, summary.centroid


def _decode_lln(
    query: Tensor, key: Tensor, value: Tensor, log_mass: Tensor, centroid: Tensor
) -> Tensor:
    # A step replaces the tensors of its summary, so each call starts from the same state.
    return lln.decode_step(query, key, value, lln.KeySummary(log_mass, centroid, BETA), alpha=ALPHA)


def _cached(
    query: Tensor, key: Tensor, value: Tensor, old_key: Tensor, old_value: Tensor
) -> tuple[Any, ...]:
    """The cache with the new token already in it: the rival's time excludes writing it."""
    return query, torch.cat((old_key, key), -2), torch.cat((old_value, value), -2)


def _summary_bytes(case: Case) -> int:
    """The float32 summary, read and written."""
    return 2 * 4 * case.batch * case.heads * case.width * (case.width + 1)


def _linear_causal(query: Tensor, key: Tensor, value: Tensor, normalised: bool = False) -> Tensor:
    """Linear attention of ``[B, N, H, D]`` by its definition: (qkᵀ ∘ mask)v / √D."""
    query, key, value = (side.transpose(1, 2) for side in (query, key, value))
    scores = (query @ key.mT * query.shape[-1] ** -0.5).tril()
    if normalised:
        scores = scores / scores.sum(-1, keepdim=True)
    return (scores @ value).transpose(1, 2)


def _fla(query: Tensor, key: Tensor, value: Tensor, normalised: bool = False) -> Tensor:
    # fla times its tiles when first called and keeps the choice on disk: a choice made while the
    # GPU was busy would slow it down permanently. So it has to choose again here.
    os.environ.setdefault("FLA_CACHE_RESULTS", "0")
    from fla.ops.linear_attn import chunk_linear_attn

    return chunk_linear_attn(query, key, value, normalize=normalised)[0]


def _needs(module: str, sentence: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        try:
            return None if find_spec(module) else sentence
        except ModuleNotFoundError:
            return sentence

    return missing


_FLA = Operation(
    "fla chunk_linear_attn, not normalised",
    _fla,
    _linear_causal,
    _linear_causal,
    kind="linear",
    group="causal",
    linear=False,
    layout=TOKENS_FIRST,
    missing=_needs("fla", "it needs the package fla (pip install flash-linear-attention)"),
)

OPERATIONS: dict[str, Operation] = {
    "sdpa": _softmax("softmax (SDPA)", None),
    "sdpa_flash": _softmax("softmax (flash)", "FLASH_ATTENTION"),
    "sdpa_cudnn": _softmax("softmax (cuDNN)", "CUDNN_ATTENTION"),
    "lln": replace(_LLN, compiled="lln_compiled"),
    "lln_matched": replace(
        _lln("LLN, moments matched", (6, 13), lln.lln_attention), compiled="lln_compiled"
    ),
    "lln_diag": replace(_LLN_DIAG, compiled="lln_diag_compiled"),
    "lln_diag_64": _lln("LLN + Diag, blocks of 64", (6, 15), partial(_given_diag, block_size=64)),
    "diag": _DIAG,
    "diag_sdpa": replace(
        _DIAG, label="Diag alone (SDPA by blocks)", run=_diag_sdpa, kind="softmax", units=None
    ),
    "lln_compiled": _compile(_LLN),
    "lln_diag_compiled": _compile(_LLN_DIAG),
    "sdpa_causal": _softmax("softmax (SDPA)", None, causal=True),
    "sdpa_flash_causal": _softmax("softmax (flash)", "FLASH_ATTENTION", causal=True),
    "sdpa_cudnn_causal": _softmax("softmax (cuDNN)", "CUDNN_ATTENTION", causal=True),
    "lln_causal": replace(_lln("LLN, causal", (4, 11), _given_causal), group="causal"),
    "lln_diag_causal": replace(
        _lln("LLN + Diag, causal", (4, 11), partial(_given_diag, is_causal=True)), group="causal"
    ),
    "fla_causal": replace(
        _FLA,
        label="fla chunk_linear_attn",
        run=partial(_fla, normalised=True),
        exact=partial(_linear_causal, normalised=True),
        plain=partial(_linear_causal, normalised=True),
        layout=POSITIVE_TOKENS_FIRST,
    ),
    "fla_causal_raw": _FLA,
    "flash_packed": Operation(
        "softmax (flash), packed",
        _flash_packed,
        partial(_by_sequence, _softmax_exact),
        partial(_by_sequence, _softmax_plain),
        kind="softmax",
        group="packed",
        linear=False,
        layout=PACKED,
        prepare=_with_longest,
        missing=_needs("torch.nn.attention.varlen", "it needs torch 2.10 or newer"),
    ),
    "lln_packed": replace(
        _lln("LLN, packed", (4, 11), _packed_lln),
        group="packed",
        layout=PACKED,
        prepare=_with_longest,
    ),
    "sdpa_decode": Operation(
        "softmax (SDPA), one token",
        F.scaled_dot_product_attention,
        partial(_whole, _softmax_exact),
        partial(_whole, _softmax_plain),
        kind="softmax",
        group="decode",
        linear=False,
        layout=DECODE,
        prepare=_cached,
        forward_only=True,
    ),
    "lln_decode": Operation(
        "LLN, one token",
        _decode_lln,
        partial(_whole, partial(_given, impl="reference")),
        partial(_whole, partial(_given, impl="eager")),
        kind="lln",
        group="decode",
        layout=DECODE,
        prepare=_summarised,
        least_bytes=_summary_bytes,
        forward_only=True,
    ),
}
