"""Context-parallel attention with exact keys: the entry point, and how it is computed.

Dimension legend: B batch, H query heads, Hk key heads, T this rank's tokens, X its tokens and those
borrowed, D head width, E value width, n blocks, W tokens in a block, G groups, K keys per group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lln.checks.call import Call
from lln.checks.signatures import explain_misfits
from lln.eager.key_attention import KeyTerms, attend_rows, share_of
from lln.eager.key_blocks import Groups
from lln.eager.run import numbers_of_blocks, repeat_heads, widen
from lln.kernels.keys.keys_ops import fused_sharded_keys
from lln.kernels.launching.limits import widest_value
from lln.matching.mass import keys_temperatures, mass_offset
from lln.parallel.agreement import Shards
from lln.parallel.compiled import outside_graphs
from lln.parallel.diagonal_part import borrow_sides
from lln.parallel.journeys import Lending
from lln.parallel.key_choice import Choice, choose_together, gather_means
from lln.parallel.key_rows import FarRows, fetch_rows
from lln.parallel.local_passes import LocalPasses, takes_keys
from lln.parallel.summary_merge import RankSummaries, gather_summaries, measure_shards
from lln.parallel.together import Together, attend_together
from lln.parallel.whole_blocks import OwnBlocks, lay_blocks
from lln.precision import accumulation_dtype


@explain_misfits
@outside_graphs
def lln_keys_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Any = None,
    lengths: Sequence[int] | None = None,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    matching: str = "rest",
    block_size: int = 64,
    keys: int = 64,
    group_size: int | None = None,
    offset: float | Tensor | None = None,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    impl: str = "auto",
) -> Tensor:
    """`lln.lln_keys_attention` of a sequence whose tokens lie on several ranks.

    The ranks exchange the mean queries of the groups, then the scores and places of each rank's
    best K keys, then the rows of the keys that were chosen, and nothing else of the keys.

    Args:
        query: ``[B, H, T, D]``, this rank's tokens.
        key: ``[B, Hk, T, D]``.
        value: ``[B, Hk, T, E]``.
        group: As in `lln.parallel.lln_attention`.
        lengths: As in `lln.parallel.lln_attention`.
        alpha: As in `lln.lln_keys_attention`, the same on all ranks.
        beta: Likewise.
        matching: As in `lln.lln_keys_attention`, from the statistics of the whole sequence.
        block_size: Tokens in a block; blocks that cross ranks are computed where they begin.
        keys: How many keys outside its block every group sees one by one.
        group_size: Queries that share their chosen keys; None = a block.
        offset: As in `lln.lln_keys_attention`; the gradient is this rank's share.
        key_mask: As in `lln.parallel.lln_diag_attention`.
        is_causal: As in `lln.lln_keys_attention`.
        scale: Factor of the scores; None = 1/√D.
        enable_gqa: As in `lln.lln_keys_attention`.
        impl: As in `lln.parallel.lln_attention`; the kernels take what those of
            `lln.lln_keys_attention` take.

    Returns:
        ``[B, H, T, E]``, the rows of this rank's tokens.
    """
    call = Call(
        "lln_keys",
        query,
        key,
        value,
        alpha,
        beta,
        matching,
        block_size=block_size,
        scale=scale,
        key_mask=key_mask,
        is_causal=is_causal,
        keys=keys,
        group_size=group_size,  # pyright: ignore[reportArgumentType] None until it is checked
        offset=offset,
    )
    return attend_together(call, Together(group, lengths, enable_gqa, impl), _attend)


def _matched(call: Call, shards: Shards) -> Callable[[], tuple[Any, Any, Any]]:
    """Start to match α, β and the offset where they are not given; what is returned waits."""
    alpha, beta, offset = call.alpha, call.beta, call.offset
    width = call.query.shape[-1]
    if alpha is not None and offset is not None:
        return lambda: (alpha, beta, offset)
    moments = whole = measure_shards(call, shards, whole_tensor=False)
    if alpha is None and call.matching == "paper":
        whole = measure_shards(call, shards, whole_tensor=True)

    def finish() -> tuple[Any, Any, Any]:
        found = moments()
        factors: tuple[Any, Any] = alpha, beta
        if alpha is None:
            own = found if whole is moments else whole()
            factors = keys_temperatures(own, width, call.matching)
        if offset is not None:
            return *factors, offset
        return *factors, mass_offset(found, *factors, width, call.scale)

    return finish


def _attend(call: Call, shards: Shards, impl: str) -> Tensor:
    """The attention of this rank's tokens, in the dtype of query or the accumulation dtype.

    What travels does so while the rank computes the next thing that does not need it: statistics
    while it borrows tokens and adds up queries, mean queries while it summarises, summaries while
    it chooses keys and fetches them.
    """
    by_kernels = takes_keys(call, impl)
    matched = _matched(call, shards)
    layout = lay_blocks(call, shards)
    query, key, value, mask = borrow_sides(call, layout)()
    own, blocks = layout.owned(), layout.place()
    valid = own if mask is None else own & mask
    # Where no block crosses ranks, no token belongs to another rank's block.
    counted = valid if layout.is_crossed or mask is not None else None
    here = OwnBlocks(layout, blocks, valid, counted, by_kernels)
    means = gather_means(query, call, here)
    # Made before what is to be computed while gradients of the rows come back.
    lending = Lending(key, value, shards.ranks, shards.purpose("fetching the chosen keys"))
    given = key
    alpha, beta, offset = matched()
    if not by_kernels:
        query, key, value = widen(query, key, value, mask, 0.0)
    call = call.replace(query=query, key=key, value=value)
    call = call.replace(alpha=alpha, beta=beta, offset=offset)
    summaries = _summaries(call, here)
    choice = choose_together(means(), given, call, here)
    longest = max(layout.extended(rank) for rank in range(shards.ranks.size))
    far = fetch_rows(lending, given, choice, longest, shards)
    if blocks.place.shape[1] == 0:
        out = _nothing(query, call, (*summaries(), far(query.dtype).rows))
    elif by_kernels:
        out = _read_by_kernels(call, here, far, summaries)
    else:
        out = _read(call, here, choice, far, summaries)
    # Ranks need not compute alike, but what they send each other must have one dtype.
    return layout.give_back(out.to(accumulation_dtype(out.dtype)) if layout.is_crossed else out)()


def _summaries(call: Call, here: OwnBlocks) -> Callable[[], RankSummaries]:
    """What every rank's blocks hold; ``sums`` are the sum of the keys and their number.

    It starts to gather; what is returned waits. The call has the tokens borrowed.
    """
    counted = here.counted
    key, dtype = call.key, accumulation_dtype(call.key.dtype)
    query, passes = call.query, LocalPasses()
    if here.by_kernels:
        heads = query.shape[0] * query.shape[1]
        passes = LocalPasses(widest_value(query, heads, 0, False, False))
    assert call.beta is not None
    log_mass, centroid = passes.summarise(call.replace(key_mask=counted), call.beta)
    held = key if counted is None else torch.where(counted[:, None, :, None], key, 0.0)
    total = held.sum(2, dtype=dtype)
    total = total.repeat_interleave(log_mass.shape[1] // max(key.shape[1], 1), 1)
    number = here.valid.sum(-1)[:, None, None].expand_as(total).to(dtype)
    sums = torch.stack([total, number], -1)
    return gather_summaries(log_mass, centroid, here.layout.shards, sums)


def _read(
    call: Call,
    here: OwnBlocks,
    choice: Choice,
    far: Callable[[torch.dtype], FarRows],
    summaries: Callable[[], RankSummaries],
) -> Tensor:
    """The rows of the blocks that begin on this rank: ``[B, H, X, E]``."""
    query, key, value = call.qkv
    layout, blocks = here.layout, here.blocks
    heads = query.shape[1]
    key, value = repeat_heads(key, heads), repeat_heads(value, heads)
    alpha, beta, offset = numbers_of_blocks(call, heads, query.dtype)
    there = blocks.valid(here.valid)
    own = there.sum(-1)
    beta = beta.squeeze(2) if isinstance(beta, Tensor) else beta
    found, count = summaries().centred(beta, heads)
    log_mass, centroid, centre = (side.unsqueeze(2) for side in found)
    held = count[:, None].expand_as(own)
    rows = layout.size // call.group_size
    seen = choice.seen.sum(-1).unflatten(2, (own.shape[1], rows))
    share = share_of(held, held - own, seen, call.group_size, query.dtype)
    # Where every place holds a key, no mask is looked at.
    mask = None if blocks.is_plain and call.key_mask is None else here.valid
    slots = log_mass, centroid, centre
    groups = Groups(blocks, call.group_size, mask)
    terms = KeyTerms(query, key, value, alpha, offset, slots, groups, call.scale)
    return attend_rows(terms, share, far(query.dtype).spread(query.shape[-1]), choice.seen)


def _read_by_kernels(
    call: Call,
    here: OwnBlocks,
    far: Callable[[torch.dtype], FarRows],
    summaries: Callable[[], RankSummaries],
) -> Tensor:
    """The same by the fused kernels, in the dtype of query."""
    query, key, value = call.qkv
    layout, blocks, counted = here.layout, here.blocks, here.counted
    if layout.is_crossed:
        # The kernels count blocks from the first token, which may belong to another rank's.
        query, key, value = (blocks.gather(side).flatten(2, 3) for side in (query, key, value))
        counted = blocks.valid(counted).flatten(1)
    assert call.beta is not None
    known = summaries()
    slots, number = known.centred(call.beta, known.log_mass.shape[2])
    key, value, indices = far(key.dtype).behind(key, value)
    assert call.alpha is not None
    assert call.offset is not None
    out = fused_sharded_keys(
        query,
        key,
        value,
        call.alpha,
        call.offset,
        slots,
        indices,
        key_mask=counted,
        held=layout.shards.bounds.tokens if counted is None else number,
        block_size=layout.size,
        group_size=call.group_size,
        scale=call.scale,
    )
    if layout.is_crossed:
        out = blocks.scatter(out.unflatten(2, blocks.place.shape[1:]))
    return out


def _nothing(query: Tensor, call: Call, sides: tuple[Tensor, ...]) -> Tensor:
    """The output of a rank without tokens, ``[B, H, 0, E]``, still connected to the others."""
    zero = query.new_zeros(())
    for side in (*sides, call.alpha, call.offset):
        if isinstance(side, Tensor):
            zero = zero + side.sum()
    rows = query.sum(-1, keepdim=True).expand(-1, -1, -1, call.value.shape[-1])
    return rows * zero
