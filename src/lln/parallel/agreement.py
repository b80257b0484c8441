"""What the ranks tell each other before a call: lengths, and whether all make the same call.

One gather of a few integers. A rank that refuses its arguments says so here, so that the others
stop too instead of waiting for it. With the lengths given by the caller only the first call of a
group asks: what is wrong is mostly wrong from the beginning, and where shapes differ Gloo ends the
process.

Dimension legend: R ranks, B batch, T queries, S keys.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from lln.checks.arguments import FLOAT_DTYPES
from lln.checks.call import Call
from lln.checks.names import shown
from lln.errors import InvalidInputError, LLNError, PeerError
from lln.parallel.collectives import gather
from lln.parallel.ranks import Bounds, Ranks
from lln.tracing import is_compiling

_KINDS = ("lln", "lln_diag", "lln_keys")
_MATCHING = ("rest", "variance", "entropy", "paper")

# What all ranks must have in common: the number that a rank tells, and how it is shown.
_COMMON: dict[str, tuple[Callable[[Call], int], Callable[[int], object]]] = {
    "operation": (lambda call: _KINDS.index(call.kind), lambda code: f"{_KINDS[code]}_attention"),
    "batch size": (lambda call: call.query.shape[0], int),
    "number of query heads": (lambda call: call.query.shape[1], int),
    "number of key heads": (lambda call: call.key.shape[1], int),
    "head width": (lambda call: call.query.shape[3], int),
    "value width": (lambda call: call.value.shape[3], int),
    "dtype": (lambda call: FLOAT_DTYPES.index(call.query.dtype), lambda code: FLOAT_DTYPES[code]),
    "is_causal": (lambda call: int(call.is_causal), bool),
    "matching": (
        lambda call: _MATCHING.index(call.matching),
        lambda code: repr(_MATCHING[code]),
    ),
    "alpha": (lambda call: _encode(call.alpha), lambda code: _decode(code)),
    "beta": (lambda call: _encode(call.beta), lambda code: _decode(code)),
    "offset": (lambda call: _encode(call.offset), lambda code: _decode(code)),
    "block_size": (lambda call: call.block_size, int),
    "scale": (lambda call: _encode(call.scale), lambda code: _decode(code)),
    "keys": (lambda call: call.keys if isinstance(call.keys, int) else -1, int),
    "group_size": (lambda call: call.group_size, int),
    "set of inputs that need gradients": (
        lambda call: sum(needed << place for place, needed in enumerate(_learning(call))),
        lambda code: f"{code:07b}",
    ),
}
_OWN = ("refused", "queries", "keys held", "masked", "begins with padding")
# As a float: a NaN, as are all larger integers.
_NOT_A_NUMBER = 0x7FF8 << 48
# Groups and operations whose ranks have compared; and whether not to, see `trusting`.
_COMPARED: set[tuple[str, str]] = set()
_TRUSTS: ContextVar[bool] = ContextVar("lln_parallel_trusts", default=False)
# How many integers a rank tells.
FACTS = len(_OWN) + len(_COMMON)


class Shards(NamedTuple):
    """What a rank knows of the others' shards.

    Attributes:
        ranks: The group.
        operation: The name of the entry point, for messages.
        bounds: Where the keys of every rank lie.
        queries: T of every rank.
        masked: Whether some rank has a key mask.
        padded: Whether some sample may begin with padding: blocks then begin elsewhere.
        masked_everywhere: Whether all ranks have a key mask.
    """

    ranks: Ranks
    operation: str
    bounds: Bounds
    queries: tuple[int, ...] | None
    masked: bool
    padded: bool
    masked_everywhere: bool = False

    def purpose(self, step: str) -> str:
        """What a collective is for, as its error says it."""
        return f"{self.operation}: {step}"


def agree(
    check: Callable[[], Call], lengths: Sequence[int] | None, ranks: Ranks, operation: str
) -> tuple[Call, Shards]:
    """Check this rank's arguments and compare them with the other ranks'.

    ``check`` checks the arguments and makes a call of them; without the number of keys of every
    rank they are asked in every call.

    Raises:
        InvalidInputError: If this rank's arguments do not fit, or differ from other ranks'.
        PeerError: If another rank refused its arguments.
    """
    if lengths is None:
        call, shards = _ask(check, ranks, operation)  # pyright: ignore[reportCallIssue]
        return call.with_fitted_blocks(shards.bounds.tokens), shards
    first = (ranks.name, operation)

    def check_lengths() -> Call:
        call = check()
        given_bounds(lengths, call.key, ranks)
        return call

    if is_compiling() or _TRUSTS.get() or first in _COMPARED:
        call = check_lengths()
    else:
        call, found = _ask(check_lengths, ranks, operation)  # pyright: ignore[reportCallIssue]
        _check_known(found, lengths)
        _COMPARED.add(first)
    masked = call.key_mask is not None
    bounds = given_bounds(lengths, call.key, ranks)
    shards = Shards(ranks, operation, bounds, None, masked, masked)
    return call.with_fitted_blocks(bounds.tokens), shards


@contextmanager
def trusting() -> Iterator[None]:
    """Calls inside that give ``lengths`` do not compare, not even the first."""
    token = _TRUSTS.set(True)
    try:
        yield
    finally:
        _TRUSTS.reset(token)


@torch.compiler.disable
def _ask(check: Callable[[], Call], ranks: Ranks, operation: str) -> tuple[Call, Shards]:
    error: LLNError | None = None
    call: Call | None = None
    try:
        call = check()
    except LLNError as caught:
        error = caught
    facts = [1, *[0] * (FACTS - 1)]
    if call is not None:
        facts = [*_own_facts(call), *(tell(call) for tell, _ in _COMMON.values())]
    device = _device(ranks, None if call is None else call.query)
    told = torch.tensor(facts, dtype=torch.int64, device=device)
    everyone = gather(told, ranks, f"{operation}: comparing the ranks' arguments").tolist()
    if call is None:
        assert error is not None
        raise error
    _compare(everyone, operation)
    own = [dict(zip(_OWN, one, strict=False)) for one in everyone]
    bounds = Bounds.of([one["keys held"] for one in own])
    masked = any(one["masked"] for one in own)
    padded = masked and bool(own[bounds.first_rank]["begins with padding"])
    queries = tuple(one["queries"] for one in own)
    everywhere = all(one["masked"] for one in own)
    return call, Shards(ranks, operation, bounds, queries, masked, padded, everywhere)


def _check_known(found: Shards, lengths: Sequence[int]) -> None:
    """Refuse ``lengths`` of other shards, and a mask that only some ranks have, on every rank."""
    if found.bounds != Bounds.of(lengths):
        starts, ends = found.bounds
        held = [end - start for start, end in zip(starts, ends, strict=True)]
        raise InvalidInputError(
            f"{found.operation}: lengths are {list(lengths)}, but the ranks hold {held} keys."
        )
    if found.masked and not found.masked_everywhere:
        raise InvalidInputError(
            f"{found.operation}: with lengths= all ranks must give key_mask or none; give an "
            "all-true mask where nothing is masked, or leave out lengths."
        )


def _own_facts(call: Call) -> list[int]:
    mask = call.key_mask
    padded = mask is not None and mask.shape[1] > 0 and not bool(mask[:, 0].all())
    return [0, call.query.shape[2], call.key.shape[2], int(mask is not None), int(padded)]


def _learning(call: Call) -> list[bool]:
    sides = (*call.qkv, call.alpha, call.beta, call.offset, call.mix)
    enabled = torch.is_grad_enabled()
    return [enabled and isinstance(side, Tensor) and side.requires_grad for side in sides]


def _encode(number: float | Tensor | None) -> int:
    """A number by its bits; None and tensors by those of NaNs, which no argument may be."""
    if number is None:
        return _NOT_A_NUMBER
    if isinstance(number, Tensor):
        return _NOT_A_NUMBER + 1 + (number.shape[-3] if number.dim() > 2 else 1)
    # 0.0 and -0.0 are the same number, but have different bits.
    return struct.unpack("<q", struct.pack("<d", float(number) + 0.0))[0]


def _decode(code: int) -> object:
    if code == _NOT_A_NUMBER:
        return None
    if code > _NOT_A_NUMBER:
        return f"a tensor for {code - _NOT_A_NUMBER - 1} heads"
    return struct.unpack("<d", struct.pack("<q", code))[0]


def _compare(everyone: list[list[int]], operation: str) -> None:
    refused = [rank for rank, told in enumerate(everyone) if told[0]]
    if refused:
        raise PeerError(
            f"{operation}: rank {refused[0]} of the group refused its arguments; its own error "
            "says why."
        )
    for place, (name, (_, show)) in enumerate(_COMMON.items(), start=len(_OWN)):
        first = everyone[0][place]
        for rank, told in enumerate(everyone):
            if told[place] != first:
                raise InvalidInputError(
                    f"{operation}: all ranks of the group must have the same {name}, got "
                    f"{show(first)} on rank 0 and {show(told[place])} on rank {rank}."
                )


def _device(ranks: Ranks, query: Tensor | None) -> torch.device:
    """Where the integers go: to the CPU if the group can send from there, so that no GPU waits."""
    able = {device.type for device in ranks.group()._device_types}
    if "cpu" in able or not able:
        return torch.device("cpu")
    return torch.device(sorted(able)[0]) if query is None else query.device


def given_bounds(lengths: Sequence[int], key: Tensor, ranks: Ranks) -> Bounds:
    """The bounds of given lengths.

    Raises:
        InvalidInputError: If they are no numbers of tokens, or not those of this rank's keys.
    """
    numbers = list(lengths)
    if not all(isinstance(one, int) and one >= 0 for one in numbers):
        wrong = next(one for one in numbers if not isinstance(one, int) or one < 0)
        raise InvalidInputError(f"lengths must be numbers of tokens, got {shown(wrong)}.")
    own = key.shape[2]
    if len(numbers) != ranks.size or numbers[ranks.own] != own:
        raise InvalidInputError(
            f"lengths must have the number of keys of each of the {ranks.size} ranks, {own} of "
            f"them on rank {ranks.own}, got {numbers}."
        )
    return Bounds.of(numbers)
