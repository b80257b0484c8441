"""Context-parallel LLN and LLN + Diag attention: the entry points, and how they are computed.

Dimension legend: B batch, H query heads, Hk key heads, T this rank's queries, S its keys, D head
width, E value width, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lln.checks.call import Call
from lln.checks.signatures import explain_misfits
from lln.eager.causal import causal_attention
from lln.eager.causal_walk import Inputs
from lln.eager.dropout import drop_keys
from lln.eager.run import repeat_heads, repeat_temperature, widen
from lln.eager.summary import read_heads
from lln.matching.moments import temperatures
from lln.parallel.agreement import Shards
from lln.parallel.compiled import outside_graphs
from lln.parallel.diagonal_part import start_diagonal
from lln.parallel.local_passes import LocalPasses, choose_passes
from lln.parallel.summary_merge import RankSummaries, gather_summaries, measure_shards
from lln.parallel.together import Together, attend_together


@explain_misfits
@outside_graphs
def lln_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Any = None,
    lengths: Sequence[int] | None = None,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    matching: str = "variance",
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    impl: str = "auto",
) -> Tensor:
    """`lln.lln_attention` of a sequence whose tokens lie on several ranks.

    Every rank calls it with its shard, the next piece of the sequence in the order of the ranks:
    shards may differ in length, be empty, and have padding anywhere. Queries and keys may be cut in
    different places. The results are those of one process, to rounding; what travels is a summary
    of ``D·(E+1)`` numbers per head, whatever the length.

    Args:
        query: ``[B, H, T, D]``, this rank's queries.
        key: ``[B, Hk, S, D]``, this rank's keys.
        value: ``[B, Hk, S, E]``.
        group: A process group, or one axis of a ``DeviceMesh``; None = all processes.
        lengths: The number of keys on every rank. None = the ranks tell each other, and compare
            their shapes and options, in one small collective that waits for its result; if given
            only the first call of a group does that (a compiled one never), and key_mask must be
            given by all ranks or by none.
        alpha: As in `lln.lln_attention`, the same on all ranks; the gradient is this rank's share,
            to be summed over the group as that of any weight.
        beta: Likewise.
        matching: As in `lln.lln_attention`, from the statistics of the whole sequence.
        key_mask: bool ``[B, S]``, True = attend; None = all of this rank's keys are valid.
        dropout_p: As in `lln.lln_attention`, by this rank's random numbers: give every rank another
            seed.
        is_causal: As in `lln.lln_attention`; queries and keys must be cut in the same places.
        enable_gqa: As in `lln.lln_attention`.
        impl: ``"auto"`` takes the fused kernels on a GPU, plain PyTorch for causal calls;
            ``"eager"`` is plain PyTorch, ``"triton"`` the kernels or an error.

    Returns:
        ``[B, H, T, E]``, the rows of this rank's queries.

    Raises:
        InvalidInputError: One sentence on what does not fit, or differs between ranks.
        PeerError: If a collective fails, or another rank refused its arguments.
    """
    sides = (query, key, value, alpha, beta, matching)
    rest = {"key_mask": key_mask, "dropout_p": dropout_p, "is_causal": is_causal}
    call = Call("lln", *sides, **rest)
    how = Together(group, lengths, enable_gqa, impl)
    return attend_together(call, how, _attend)


@explain_misfits
@outside_graphs
def lln_diag_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Any = None,
    lengths: Sequence[int] | None = None,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    matching: str = "variance",
    block_size: int | None = None,
    mix: float | Tensor = 0.5,
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    impl: str = "auto",
) -> Tensor:
    """`lln.lln_diag_attention` of a sequence whose tokens lie on several ranks.

    Blocks that cross the boundary of a shard are computed by the rank that holds their first token:
    it borrows at most ``block_size - 1`` tokens and gives their rows back. Where every shard begins
    with a block and no sample begins with padding, nothing is borrowed.

    Args:
        query: ``[B, H, T, D]``, this rank's tokens.
        key: ``[B, Hk, T, D]``.
        value: ``[B, Hk, T, E]``.
        group: As in `lln_attention`.
        lengths: As in `lln_attention`.
        alpha: As in `lln_attention`.
        beta: As in `lln_attention`.
        matching: As in `lln_attention`.
        block_size: Tokens in a diagonal block; None = D.
        mix: As in `lln.lln_diag_attention`, for this rank's rows.
        key_mask: As in `lln_attention`. Blocks are counted from the first valid token of the whole
            sequence.
        dropout_p: As in `lln_attention`.
        is_causal: As in `lln_attention`.
        scale: Factor of the diagonal part's scores; None = 1/√D.
        enable_gqa: As in `lln_attention`.
        impl: As in `lln_attention`.

    Returns:
        ``[B, H, T, E]``, the rows of this rank's tokens.
    """
    sides = (query, key, value, alpha, beta, matching, mix)
    rest = (scale, key_mask, dropout_p, is_causal)
    # Without a block size it is D, once the query is checked.
    call = Call("lln_diag", *sides, block_size, *rest)  # pyright: ignore[reportArgumentType]
    how = Together(group, lengths, enable_gqa, impl)
    return attend_together(call, how, _attend)


def _attend(call: Call, shards: Shards, impl: str) -> Tensor:
    """The attention of this rank's tokens, of either kind."""
    passes = choose_passes(call, impl, shards)
    matched = _temperatures(call, shards)
    # The values are dropped once: for the summary and what is read beside it, and the same keys
    # from blocks, also where a block is on another rank.
    call = call.replace(value=drop_keys(call.value, call.dropout_p))
    # What one part sends travels while the other is computed; backward likewise.
    diagonal = start_diagonal(call, passes, shards) if call.kind == "lln_diag" else None
    found = matched()
    summaries = gather_summaries(*passes.summarise(call, found[1]), shards)
    if diagonal is None:
        return _long_range(call, *found, passes, shards, summaries)
    short_range = diagonal()
    long_range = _long_range(call, *found, passes, shards, summaries)
    return passes.join(long_range, short_range(), call.mix)


def _temperatures(call: Call, shards: Shards) -> Callable[[], tuple[Any, Any]]:
    """Start to match α and β, if they are not given; what is returned waits for the statistics."""
    if call.alpha is not None:
        return lambda: (call.alpha, call.beta)
    moments = measure_shards(call, shards, whole_tensor=call.matching == "paper")
    return lambda: temperatures(moments(), call.query.shape[-1], call.matching)


def _long_range(
    call: Call,
    alpha: float | Tensor,
    beta: float | Tensor,
    passes: LocalPasses,
    shards: Shards,
    summaries: Callable[[], RankSummaries],
) -> Tensor:
    """LLN attention of this rank's queries; asks for the summaries as late as it can."""
    if not call.is_causal:
        return passes.read(call, alpha, *summaries().merged())
    sides = (call.query, call.key, call.value)
    query, key, value = widen(*sides, call.key_mask, 0.0)
    heads = query.shape[1]

    def before() -> tuple[Tensor, Tensor]:
        log_mass, centroid = summaries().before(shards.ranks.own).merged()
        return repeat_heads(log_mass, heads), repeat_heads(centroid, heads)

    if query.shape[2] == 0:
        return read_heads(query, alpha, *before())
    key, value = repeat_heads(key, heads), repeat_heads(value, heads)
    alpha, beta = (repeat_temperature(side, heads, query.dtype) for side in (alpha, beta))
    return causal_attention(Inputs(query, key, value, alpha, beta, call.key_mask), before)
