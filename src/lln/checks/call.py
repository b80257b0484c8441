"""The arguments of a checked call in one object, which every way to compute it takes.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width,
E value width, n packed sequences.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from lln.checks.printing import brief
from lln.tracing import always_holds, is_compiling

# Blocks up to this size are never cut: kernels and compiled passes have tiles for them.
USUAL_BLOCK = 64


class Call(NamedTuple):
    """A call of attention.

    Attributes:
        kind: ``"lln"``, ``"diag"``, ``"lln_diag"``, ``"window"``, ``"pages"`` or ``"lln_keys"``;
            ``"decode"``, one token after others; what a module asks for by itself, the
            ``"moments"`` or ``"temperatures"`` of queries and keys; or ``"softmax"``, which
            instruments see in models and none of our ways computes.
        query: ``[B, H, T, D]``, or packed ``[T, H, D]``.
        key: ``[B, Hk, S, D]``, or packed ``[T, Hk, D]``.
        value: ``[B, Hk, S, E]``, or packed ``[T, Hk, E]``.
        alpha: A number, or broadcasts to ``[B, H, 1, 1]`` (packed: ``[n, H, 1, 1]``); None = from
            ``matching``.
        beta: Likewise, or per key head.
        matching: Where α and β come from if they are not given.
        mix: Weight of the LLN part of ``"lln_diag"``; broadcasts to the output.
        block_size: Tokens in a diagonal block; 0 = there is no diagonal part.
        scale: Factor of the diagonal part's scores; None = 1/√D.
        key_mask: bool ``[B, S]``, True = attend.
        dropout_p: Probability to drop a key.
        is_causal: Whether row i sees keys 0 … i only.
        bounds: ``cu_seqlens`` ``[n + 1]`` of packed sequences; None = dense.
        longest: Length of the longest packed sequence, or more; None = unknown.
        keys: Of ``"lln_keys"``: how many keys to choose per group of queries, or their indices
            ``[B, H, G, K]`` (packed: ``[H, G, K]``).
            Of ``"pages"``: how many pages per query, or their numbers ``[B, Hk, T, P]``.
        group_size: Queries that share their chosen keys.
        window: Of ``"window"`` and ``"pages"``: how many tokens before its own a query sees, and
            how many behind it where it is not causal.
        sinks: Of ``"pages"``: how many first tokens of its sequence every query sees.
        page_size: Of ``"pages"``: tokens in a page.
        choice_query: Of ``"pages"``: what pages are chosen by, ``[B, H, T, r]`` or packed; None =
            query.
        choice_key: Likewise, ``[B, Hk, S, r]``; None = key.
        summary: Of ``"decode"``: the `KeySummary` of all tokens so far.
        offset: What is added to the logits of the slots; a number, or broadcasts to
            ``[B, H, 1, 1]``; None = by mass matching.
        or_softmax: Of ``"lln_keys"``: whether softmax itself may answer where it is sooner.
    """

    kind: str
    query: Tensor
    key: Tensor
    value: Tensor
    # float | Tensor | None, but not None after matching.
    alpha: Any = None
    beta: Any = None
    matching: str = "variance"
    mix: float | Tensor = 1.0
    block_size: int = 0
    scale: float | None = None
    key_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    bounds: Tensor | None = None
    longest: int | None = None
    # int | Tensor
    keys: Any = 0
    group_size: int = 0
    offset: Any = None
    summary: Any = None
    window: int = 0
    sinks: int = 0
    page_size: int = 0
    choice_query: Tensor | None = None
    choice_key: Tensor | None = None
    or_softmax: bool = False

    def __repr__(self) -> str:
        """What was given, tensors by their shapes."""
        usual = Call._field_defaults
        parts = zip(FIELDS, self, strict=True)
        return brief(self, {name: part for name, part in parts if part is not usual.get(name)})

    def replace(self, **changes: Any) -> Call:
        """The same call with some fields changed, by their names."""
        # Not `_replace`, which torch.compile cannot trace in all versions.
        values: dict[str, Any] = dict(zip(FIELDS, self, strict=True))
        values.update(changes)
        return Call(**values)

    def with_fitted_blocks(self, longest: int | None = None) -> Call:
        """With blocks and windows that do not reach far beyond the longest sequence, if known."""
        if self.window:
            # A window of all tokens shows no fewer than a larger one.
            tokens = self.key.shape[2] if self.bounds is None else self.longest
            tokens = self.key.shape[0] if tokens is None else tokens
            holds = always_holds if is_compiling() else bool
            return self.replace(window=max(tokens, 1)) if holds(self.window > tokens) else self
        if not self.block_size:
            return self
        tokens = longest
        if tokens is None:
            tokens = self.query.shape[2] if self.bounds is None else self.longest
        tokens = self.query.shape[0] if tokens is None else tokens
        size, group = fit_blocks(self.block_size, self.group_size or 1, tokens)
        if size == self.block_size:
            return self
        return self.replace(block_size=size, group_size=group if self.group_size else 0)

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def has_temperatures(self) -> bool:
        """Whether it has a part of LLN attention, with α and β."""
        return self.kind not in ("diag", "window", "pages")

    @property
    def samples(self) -> int:
        """How many samples, or packed sequences."""
        return self.query.shape[0] if self.bounds is None else self.bounds.shape[0] - 1

    @property
    def factor(self) -> float:
        """What the scores of softmax attention are multiplied with."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else float(self.scale)

    @property
    def sight(self) -> dict[str, Any]:
        """Of ``"pages"``: what a query sees beside its pages, and how pages lie."""
        names = ("window", "sinks", "page_size", "key_mask", "is_causal")
        return {name: getattr(self, name) for name in names}

    @property
    def block_rows(self) -> int:
        """Tokens in the longest block, at least 1; 0 where there are no blocks."""
        if not self.block_size:
            return 0
        if self.bounds is None:
            longest: int = self.query.shape[2]
        else:
            longest = self.block_size if self.longest is None else self.longest
        return min(self.block_size, max(longest, 1))

    @property
    def mix_learns(self) -> bool:
        """Whether mix needs a gradient; the same in both runs of a checkpointed forward."""
        return isinstance(self.mix, Tensor) and self.mix.requires_grad

    @property
    def mix_has_channels(self) -> bool:
        """Whether mix differs from channel to channel."""
        return isinstance(self.mix, Tensor) and self.mix.dim() > 0 and self.mix.shape[-1] != 1


FIELDS = Call._fields


def fit_blocks(block_size: int, group_size: int, tokens: int) -> tuple[int, int]:
    """Sizes of blocks and groups, cut where they reach far beyond the sequence.

    A block that holds all tokens gives the same whatever else would fit into it, but memory and
    time grow with it. It becomes a power of two, as kernels need it, times the size of a group.

    Args:
        block_size: W as asked for.
        group_size: g, a divisor of W.
        tokens: T, of the longest sequence.
    """
    most = USUAL_BLOCK
    # A trace must hold for every length: there only what is known of all lengths counts.
    holds = always_holds if is_compiling() else bool
    while most < block_size and not holds(tokens <= most):
        most *= 2
    if most >= block_size:
        return block_size, group_size
    group_size = size = min(group_size, most)
    while size < most:
        size *= 2
    return min(size, block_size), group_size
