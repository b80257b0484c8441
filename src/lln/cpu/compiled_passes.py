"""Calls of the compiled passes, without gradients.

The C++ in ``cpp`` computes what `lln.eager.run`, `lln.eager.causal_walk` and
`lln.matching.moments` compute with PyTorch, head by head from cache;
`lln.functional.cpu_ways` says which calls.

Widths that are no multiple of `GROUP` are padded with zeros. Grouped query heads share a key head;
its gradients are found for each of them and then added.

Dimension legend: B batch, H query heads, Hk key heads, n query heads of all samples, T queries,
S keys, D head width, E value width.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.cpu import library
from lln.errors import MemoryShortageError

# Channels come in groups of as many.
GROUP = 16


class Blocks(NamedTuple):
    """The short range of a call.

    Attributes:
        size: b; the last block may be shorter.
        scale: Factor of the scores.
        mix: Share of LLN in the output; None = there are blocks alone.
        is_causal: Whether a token sees only itself and earlier tokens.
        window: Tokens that a row sees on either side of its own; -1 = its block.
    """

    size: int
    scale: float
    mix: float | None
    is_causal: bool = False
    window: int = -1


class Exact(NamedTuple):
    """The exact keys of a call, outside its blocks.

    Attributes:
        keys: How many every group of queries chooses, or their indices, int64 ``[B, H, G, K]``.
        group: Queries in a group.
        groups: G.
        offset: What is added to the slots' logits: a number, or ``[n or 1, 1, 1]``.
        dtype: Of the caller's queries, to which the mean of a group is rounded.
    """

    keys: int | Tensor
    group: int
    groups: int
    offset: float | Tensor = 0.0
    dtype: torch.dtype = torch.float32


class Pages(NamedTuple):
    """What a query sees beside its window, whose size and direction are those of `Blocks`.

    Attributes:
        keys: How many pages every query chooses, or their numbers, int64 ``[B, Hk, T, P]``.
        sinks: First tokens.
        size: Tokens in a page.
        choice_query: What pages are chosen by, ``[B, H, T, r]``.
        choice_key: Likewise, ``[B, Hk, S, r]``.
        dtype: Of all tensors of the call but the output: float32 or bfloat16.
    """

    keys: int | Tensor
    sinks: int
    size: int
    choice_query: Tensor
    choice_key: Tensor
    dtype: torch.dtype


# Bits of a float that shorter types do not have.
DROPPED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}

# Rows of a window that go through the cache together.
WINDOW_ROWS = 64


# The structures of the source as bytes, which are filled faster than those of ctypes.
# A call: nine sizes, where temperatures are, temperatures, blocks, where the mask is, two answers,
# the window, five sizes of exact keys, offsets, three sizes of pages.
_CALL = struct.Struct("@9q2P2fq2fP3q5qPf3q")
# A tensor: where it is, and its first three strides.
_SIDE = struct.Struct("@P3q")
# A curve: five coefficients, two limits and the floor.
_CURVE = struct.Struct("@8d")


class _Asked(NamedTuple):
    """What the library is asked for, and the tensors that it then reads."""

    call: bytes
    kept: tuple[Tensor | None, ...]


def packed_curve(coefficients: Sequence[float], limits: tuple[float, float], floor: float) -> bytes:
    """A curve of moment matching at one head width and number of keys.

    Coefficients are those of 1, u, …, u⁴, limits those of p; smaller spreads than the floor are
    rounding noise.
    """
    return _CURVE.pack(*coefficients, *limits, floor)


def employs_threads(heads: int) -> bool:
    """Whether most threads get work: a head is computed by one."""
    return 2 * heads >= torch.get_num_threads()


class PassCall(NamedTuple):
    """What the passes compute.

    Attributes:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, S, D]``.
        value: ``[B, Hk, S, E]``.
        alpha: A number, or ``[n or 1, 1, 1]``.
        beta: Likewise.
        blocks: The short range; None = LLN alone. Causal ones are alone.
        key_mask: bool ``[B, S]``, True = attend.
        exact: Keys beside those of the blocks; None = LLN is added to the blocks instead.
        pages: Keys beside those of the window; then nothing else is computed.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    alpha: float | Tensor
    beta: float | Tensor
    blocks: Blocks | None = None
    key_mask: Tensor | None = None
    exact: Exact | None = None
    pages: Pages | None = None

    def grouped(self, *others: Tensor) -> list[Tensor]:
        """Query, key, value and others, as wide as the passes want them."""
        return [_grouped(side) for side in (self.query, self.key, self.value, *others)]

    def gradients(self, name: str, gradient: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
        """Those of query, key and value, by a function of the library."""
        sides = self.grouped(gradient)
        # Those of keys are made for every query head.
        made = [side.new_empty((*sides[0].shape[:2], *side.shape[2:])) for side in sides[:3]]
        _ask(name, _call(self), sides, *others, *made)
        return tuple(_own(*pair) for pair in zip(made, self[:3], strict=True))


def forward(
    call: PassCall, keeps: bool = False, curves: Sequence[bytes] = ()
) -> tuple[Tensor, list[Tensor]]:
    """The output ``[B, H, T, E]``, and the summary that `backward` needs, if it is asked for.

    With curves α and β are matched as by `match`, and written to what is given.
    """
    query, blocks, sides = call.query, call.blocks, call.grouped()
    out = query.new_empty((*query.shape[:-1], sides[2].shape[-1]))
    summary = None
    if blocks is None or blocks.mix is not None:
        heads = query.shape[0] * query.shape[1]
        summary = query.new_empty((heads, sides[2].shape[-1] + 2, sides[0].shape[-1]))
    asked = _call(call, writes=bool(curves))
    _ask("lln_forward", asked, sides, b"".join(curves) or None, out, summary)
    return _cut(out, call.value.shape[-1]), [summary] if keeps and summary is not None else []


def backward(call: PassCall, gradient: Tensor, summary: Tensor | None) -> tuple[Tensor, ...]:
    """Gradients of query, key and value, from that of the output and the summary of `forward`."""
    return call.gradients("lln_backward", gradient, summary)


def forward_causal(call: PassCall) -> list[Tensor]:
    """The output of causal LLN, what `backward_causal` needs, and every head's least normaliser."""
    query, sides = call.query, call.grouped()
    out = query.new_empty((*query.shape[:-1], sides[2].shape[-1]))
    norm, shift = (query.new_empty(query.shape[:-1]) for _ in range(2))
    least = query.new_empty(query.shape[0] * query.shape[1])
    _ask("lln_causal_forward", _call(call), sides, out, norm, shift, least)
    return [_cut(out, call.value.shape[-1]), norm, shift, least]


def backward_causal(
    call: PassCall, gradient: Tensor, out: Tensor, norm: Tensor, shift: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value, from that of the output and what was kept."""
    return call.gradients("lln_causal_backward", gradient, _grouped(out), norm, shift)


def forward_keys(call: PassCall, keeps: bool = False) -> tuple[Tensor, list[Tensor]]:
    """Attention with exact keys ``[B, H, T, E]``, as the query in memory, and what was chosen."""
    assert call.exact is not None
    query, sides, keys = call.query, call.grouped(), call.exact.keys
    shape = (*query.shape[:-1], sides[2].shape[-1])
    out = _empty_like(query, sides[2].shape[-1])
    found = _given(keys)
    if keeps and isinstance(keys, int):
        found = query.new_empty((*shape[:2], call.exact.groups, keys), dtype=torch.int64)
    _ask("lln_keys_forward", _call(call), (*sides, out), found)
    return out[..., : call.value.shape[-1]], [] if found is None else [found]


def backward_keys(call: PassCall, gradient: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key and value and of every head's α, β and offset; keys as kept."""
    assert call.exact is not None
    call = call._replace(exact=call.exact._replace(keys=keys))
    numbers = keys.new_empty((3, *keys.shape[:2], 1, 1), dtype=torch.float32)
    return *call.gradients("lln_keys_backward", gradient, keys, numbers), *numbers


def choose(call: PassCall) -> Tensor:
    """The keys that `forward_keys` chooses, int64 ``[B, H, G, K]``; -1 = none."""
    assert call.exact is not None
    query, exact, keys = call.query, call.exact, call.exact.keys
    assert isinstance(keys, int)
    found = query.new_empty((*query.shape[:2], exact.groups, keys), dtype=torch.int64)
    _ask("lln_keys_forward", _call(call), call.grouped(), None, found)
    return found


def forward_pages(call: PassCall, attends: bool = True) -> Tensor:
    """Attention to a window, sinks and pages, float32 ``[B, H, T, E]``; or int64 pages alone."""
    assert call.pages is not None
    keys, sides = call.pages.keys, call.grouped(*call.pages[3:5])
    if attends:
        out = _empty_like(call.query, sides[2].shape[-1])
        _ask("lln_pages_forward", _call(call), (*sides, out), _given(keys))
        return out[..., : call.value.shape[-1]]
    assert isinstance(keys, int)
    found = sides[1].new_empty((*call.key.shape[:2], call.query.shape[2], keys), dtype=torch.int64)
    _ask("lln_pages_forward", _call(call), sides, None, found)
    return found


def match(
    query: Tensor, key: Tensor, curves: Sequence[bytes], key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """α and β by moment matching, ``[B, H, 1, 1]`` each.

    There is one `packed_curve`, with a mask one for every sample; if T = S the mask counts for the
    queries, too.
    """
    alpha = query.new_empty((*query.shape[:2], 1, 1))
    beta = torch.empty_like(alpha)
    call = PassCall(query, key, key, alpha, beta, None, key_mask)
    _ask("lln_match", _call(call, writes=True), (_grouped(query), _grouped(key)), b"".join(curves))
    return alpha, beta


def _ask(name: str, asked: _Asked, sides: Sequence[Tensor], *others: Tensor | bytes | None) -> None:
    """Call a function of the library.

    It reads ``sides`` ``[B, H, tokens, channels]`` wherever they lie in memory; then come tensors
    without gaps, and the curves of matching, if there are any.

    Raises:
        MemoryShortageError: If it got no memory for its own work.
    """
    rows = [_rows(side) for side in sides]
    places = [_SIDE.pack(side.data_ptr(), *side.stride()[:3]) for side in rows]
    ends = [side.data_ptr() if isinstance(side, Tensor) else side for side in others]
    if not getattr(library.load(), name)(asked.call, *places, *ends):
        raise MemoryShortageError(
            "the compiled passes got no memory for their own work; use smaller batches or fewer "
            "threads (torch.set_num_threads)."
        )


def _whole(width: int) -> int:
    """The least multiple of `GROUP` from a width on."""
    return -(-width // GROUP) * GROUP


def _grouped(side: Tensor) -> Tensor:
    """The tensor with channels of zeros that make its width a multiple of `GROUP`."""
    missing = -side.shape[-1] % GROUP
    return F.pad(side, (0, missing)) if missing else side


def _given(keys: int | Tensor) -> Tensor | None:
    """The keys or pages that a caller has chosen."""
    return keys if isinstance(keys, Tensor) else None


def _empty_like(query: Tensor, width: int) -> Tensor:
    """Room for an output of so many channels in float32, as the query in memory."""
    batch, heads, tokens, _ = query.shape
    if query.stride(1) < query.stride(2):
        shape = (batch, tokens, heads, width)
        return query.new_empty(shape, dtype=torch.float32).transpose(1, 2)
    return query.new_empty((batch, heads, tokens, width), dtype=torch.float32)


def _cut(side: Tensor, width: int) -> Tensor:
    """The first channels, one row after the other in memory."""
    return side if side.shape[-1] == width else side[..., :width].contiguous()


def _own(gradient: Tensor, side: Tensor) -> Tensor:
    """The gradient of a tensor from those of all channels and of all query heads."""
    heads = side.shape[1]
    if gradient.shape[1] != heads:
        gradient = gradient.unflatten(1, (heads, -1)).sum(2)
    return _cut(gradient, side.shape[-1])


def _rows(side: Tensor) -> Tensor:
    """The tensor, copied only if its memory does not hold its rows as they are."""
    return side if side.stride(-1) == 1 and not side.is_neg() else side.resolve_neg().contiguous()


def _call(asked: PassCall, writes: bool = False) -> _Asked:
    """What the library is asked for; ``writes``: it finds the temperatures of all heads itself."""
    query, key, value, alpha, beta, blocks, key_mask, exact, pages = asked
    size, scale, mix, is_causal, window = blocks or (0, 1.0, 1.0, False, -1)
    if exact is None:
        # A block of all tokens is the largest that there is.
        size = min(size, query.shape[2])
    keys, group, groups, offset, dtype = exact or (0, 0, 0, 0.0, torch.float32)
    sinks, page_size, choice_width = 0, 0, 0
    if pages is not None:
        keys, sinks, page_size, choice_query, _, dtype = pages
        choice_width = _whole(choice_query.shape[-1])
    number, is_given = (keys.shape[-1], True) if isinstance(keys, Tensor) else (keys, False)
    offsets, one_offset, kept_offset = _temperature(offset, is_written=False)
    alphas, one_alpha, kept_alpha = _temperature(alpha, writes)
    betas, one_beta, kept_beta = _temperature(beta, writes)
    mask = None if key_mask is None else key_mask.contiguous()
    call = _CALL.pack(
        *query.shape[:2],
        key.shape[1],
        query.shape[2],
        key.shape[2],
        _whole(query.shape[3]),
        query.shape[3],
        _whole(value.shape[3]),
        torch.get_num_threads(),
        alphas,
        betas,
        one_alpha,
        one_beta,
        size,
        scale,
        mix or 0.0,
        0 if mask is None else mask.data_ptr(),
        mix is None,
        is_causal,
        window,
        number,
        group,
        groups,
        is_given,
        DROPPED_BITS[dtype],
        offsets,
        one_offset,
        sinks,
        page_size,
        choice_width,
    )
    return _Asked(call, (kept_alpha, kept_beta, mask, kept_offset))


def _temperature(given: float | Tensor, is_written: bool) -> tuple[int, float, Tensor | None]:
    """Where the temperatures of the heads are; else the one number of all; and what to keep."""
    if not isinstance(given, Tensor):
        return 0, float(given), None
    if given.numel() == 1 and not is_written:
        return 0, given.item(), None
    given = given.contiguous()
    return given.data_ptr(), 1.0, given
