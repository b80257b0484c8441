"""The instruments applied to one call seen inside a model.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lln.checks.call import Call
from lln.checks.printing import brief
from lln.eager.run import repeat_heads
from lln.instruments import of_matrix
from lln.instruments.entropy import entropy
from lln.instruments.head_groups import per_head
from lln.instruments.interception import Sighting
from lln.instruments.log_normality import log_normality
from lln.instruments.pair_masks import reduce_mask, shown
from lln.instruments.score_variance import score_variance
from lln.instruments.spectral_gap import spectral_gap
from lln.instruments.temperature import temperature
from lln.instruments.variance import variance
from lln.precision import without_autocast
from lln.reference import page_pairs

INSTRUMENTS: dict[str, Callable[..., Any]] = {
    "temperature": temperature,
    "entropy": entropy,
    "spectral_gap": spectral_gap,
    "variance": variance,
    "log_normality": log_normality,
    "score_variance": score_variance,
}

# Numbers of a layer itself, reported where it has them.
_OF_LAYER = ("alpha", "beta", "offset")

# Instruments that also read P itself, for calls where queries and keys do not determine it.
_OF_MATRIX = ("temperature", "entropy", "spectral_gap", "variance", "log_normality")

# Entries of a P that is formed for one head at a time: 128 MiB.
_LARGEST_MATRIX = 1 << 24

_TOO_MANY_PAIRS = (
    "which pairs a window and pages hold is written out for one text at a time and at most 4,096 "
    "tokens"
)


@dataclass(frozen=True)
class SeenCall:
    """An attention call inside a model, ready to be measured.

    Attributes:
        layer: Path of the module in the model.
        call: How many calls of this layer and kind came before.
        kind: ``"softmax"``, ``"lln"``, ``"diag"``, ``"lln_diag"``, ``"window"`` or ``"lln_keys"``.
        query: ``[B, H, T, D]``, detached; ``[T, H, D]`` if packed.
        key: ``[B, Hk, S, D]``, likewise.
        options: The other arguments of an instrument: α, β, masks, scale, chosen keys.
        pair_mask: A mask over pairs of tokens that the options cannot express.
        weights: P, if the model computed it anyway.
        problem: Why queries and keys do not determine P, or what was not measured; else empty.
        values: What was measured, by instrument.
    """

    layer: str
    call: int
    kind: str
    query: Tensor
    key: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    pair_mask: Tensor | None = None
    weights: Tensor | None = None
    problem: str = ""
    values: dict[str, Tensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        """By shapes."""
        return brief(self, vars(self))

    @property
    def tokens(self) -> tuple[int, int]:
        """(T, S); of packed sequences their total."""
        if self.query.is_nested:
            return 0, 0
        axis = 0 if self.options.get("cu_seqlens") is not None else 2
        return self.query.shape[axis], self.key.shape[axis]


def prepare(layer: str, call: int, sighting: Sighting) -> SeenCall:
    """Bring a sighting into the form that instruments take."""
    seen = sighting.call
    query, key = seen.query.detach(), seen.key.detach()
    options: dict[str, Any] = {"scale": seen.scale, "is_causal": seen.is_causal}
    options["key_mask"] = seen.key_mask
    pair_mask, problem = None, sighting.problem
    if seen.kind in ("lln", "lln_diag", "lln_keys"):
        options |= {"alpha": _detach(seen.alpha), "beta": _detach(seen.beta)}
    if seen.kind in ("diag", "lln_diag", "lln_keys"):
        options["block_size"] = seen.block_size
    if seen.kind == "lln_keys":
        options |= {"offset": _detach(seen.offset), "keys": seen.keys}
        options["group_size"] = seen.group_size
    if seen.kind == "window":
        options["window"] = seen.window
    if seen.kind == "lln_diag":
        options["mix"] = _detach(seen.mix)
        if seen.mix_has_channels:
            problem = "its two parts are mixed by channel, so that no single P describes them"
    kind = seen.kind
    if kind == "pages":
        kind, pair_mask = "softmax", _page_pairs(seen)
        problem = problem or ("" if pair_mask is not None else _TOO_MANY_PAIRS)
        options["is_causal"] = False
    if seen.bounds is not None:
        options["cu_seqlens"] = seen.bounds
    elif not query.is_nested and seen.kind == "softmax":
        reduced = reduce_mask(sighting.pair_mask, seen.is_causal, query, key)
        pair_mask, options["is_causal"] = reduced.pair_mask, reduced.is_causal
        if reduced.key_mask is not None:
            given = options["key_mask"]
            options["key_mask"] = reduced.key_mask if given is None else given & reduced.key_mask
        if pair_mask is None and reduced.is_causal and query.shape[2] != key.shape[2]:
            # Row i sees keys 0 … i of another sequence: no kind of ours.
            shape = (query.shape[2], key.shape[2])
            pair_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()[None, None]
    return SeenCall(layer, call, kind, query, key, options, pair_mask, sighting.weights, problem)


def _page_pairs(seen: Call) -> Tensor | None:
    """Which pairs the softmax over a window, sinks and pages holds; None = too many to form."""
    if seen.bounds is not None or seen.query.shape[2] * seen.key.shape[2] > _LARGEST_MATRIX:
        return None
    pages = repeat_heads(seen.keys, seen.query.shape[1])
    return page_pairs(pages, seen.key.shape[2], **seen.sight)


def measure(seen: SeenCall, instruments: Sequence[str]) -> tuple[dict[str, Tensor], str]:
    """Every instrument's values on the CPU, and one sentence on what is missing.

    Values are ``[B, H]``, quantiles ``[B, H, Q]``.

    A call that cannot be measured must not end the run that it belongs to: what an instrument
    raises becomes that sentence.
    """
    values: dict[str, Tensor] = {}
    if not instruments:
        return values, seen.problem
    problem = ""
    with torch.no_grad(), without_autocast(seen.query):
        for name in (*_OF_LAYER, *instruments):
            try:
                for field_name, tensor in _measure(seen, name):
                    values[field_name] = tensor.detach().to("cpu", torch.float64)
            except Exception as error:
                lines = str(error).splitlines() or [type(error).__name__]
                problem = problem or f"not measured: {lines[0].rstrip('.')}"
    return values, problem or _missing(seen)


def _measure(seen: SeenCall, name: str) -> Iterator[tuple[str, Tensor]]:
    """The values of one instrument, or α, β or the offset of the layer."""
    if name in _OF_LAYER:
        if seen.options.get(name) is not None:
            packed = seen.options.get("cu_seqlens")
            batch = seen.query.shape[0] if packed is None else packed.shape[0] - 1
            cpu = torch.device("cpu")
            side = per_head(seen.options[name], batch, seen.query.shape[1], cpu)
            yield name, side[..., 0, 0]
        return
    queries, keys = seen.tokens
    if (seen.problem and seen.weights is None) or (name == "spectral_gap" and queries != keys):
        # A walk along P needs as many rows as columns.
        return
    if not seen.problem and seen.pair_mask is None:
        found = INSTRUMENTS[name](seen.query, seen.key, kind=seen.kind, **seen.options)
        yield from _flatten(name, found)
    elif name in _OF_MATRIX:
        if queries * keys > _LARGEST_MATRIX:
            raise ValueError(
                f"its mask over pairs of tokens needs the {queries}×{keys} matrix, which is too "
                "large to form"
            )
        yield from _flatten(name, _over_matrices(getattr(of_matrix, name), seen))


def _flatten(name: str, found: Any) -> Iterator[tuple[str, Tensor]]:
    """A result by name: itself, or those of its fields that are of heads."""
    if isinstance(found, Tensor):
        yield name, found
        return
    for field_name, tensor in found._asdict().items():
        if tensor.dim() >= 2:
            yield f"{name}.{field_name}", tensor


def _over_matrices(instrument: Callable[[Tensor], Any], seen: SeenCall) -> Any:
    """An instrument of P for every sample and head, with one P formed at a time."""
    batch, heads = seen.query.shape[:2]
    found = [
        instrument(_matrix(seen, b, h)[None, None]) for b in range(batch) for h in range(heads)
    ]
    if isinstance(found[0], Tensor):
        return torch.cat(found).view(batch, heads)
    fields = zip(*found, strict=True)
    return type(found[0])(
        *(
            torch.cat(parts).view(batch, heads, *parts[0].shape[2:])
            if parts[0].dim() >= 2
            else parts[0]
            for parts in fields
        )
    )


def _matrix(seen: SeenCall, sample: int, head: int) -> Tensor:
    """P of one head, rows of padding zero."""
    queries, keys = seen.tokens
    keep = torch.ones(queries, keys, dtype=torch.bool, device=seen.query.device)
    mask = None
    if seen.pair_mask is not None:
        mask = seen.pair_mask.expand(*seen.query.shape[:2], queries, keys)[sample, head]
        keep = keep & shown(mask)
    if seen.options.get("key_mask") is not None:
        keep = keep & seen.options["key_mask"][sample]
    if seen.problem and seen.weights is not None:
        matrix = seen.weights[sample, head]
    else:
        query = seen.query[sample, head].double()
        key = repeat_heads(seen.key, seen.query.shape[1])[sample, head].double()
        scale = seen.options.get("scale")
        scores = (query.shape[-1] ** -0.5 if scale is None else scale) * query @ key.mT
        if mask is not None and mask.dtype != torch.bool:
            scores = scores + mask
        matrix = scores.masked_fill(~keep, -torch.inf).softmax(-1)
    # A row of zeros is a query that saw nothing, and does not count.
    return torch.where(keep.any(-1, keepdim=True), matrix, 0.0)


def _missing(seen: SeenCall) -> str:
    """One sentence on heads without a value."""
    if seen.problem and seen.weights is None:
        return f"not measured: {seen.problem}"
    for name, side in (("queries", seen.query), ("keys", seen.key)):
        if seen.options.get("cu_seqlens") is not None:
            bad = ~side.isfinite().all(-1).all(0)
        else:
            finite = side.isfinite().all(-1)
            mask = seen.options.get("key_mask")
            if mask is not None and mask.shape[1] == side.shape[2]:
                finite = finite | ~mask[:, None]
            bad = ~finite.all(-1)
        if bool(bad.any()):
            count = f"{int(bad.sum())} of {bad.numel()} heads"
            return f"not measured: {name} hold NaN or infinity in {count}"
    return ""


def _detach(side: float | Tensor | None) -> float | Tensor | None:
    return side.detach() if isinstance(side, Tensor) else side
