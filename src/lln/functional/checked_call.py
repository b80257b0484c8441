"""The one place that checks the arguments of an attention, whatever its layout and number of ranks.

Dimension legend: as in `lln.checks.call`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lln import checks
from lln.checks.bounds import check_bounds
from lln.checks.call import Call
from lln.checks.key_options import (
    KEYS_MATCHING,
    check_group_size,
    check_keys,
    check_not_causal,
    check_offset,
)
from lln.checks.names import check_choice
from lln.checks.page_options import check_last_queries, check_pages
from lln.eager.key_blocks import blocks_in
from lln.errors import CausalStatisticsError, InvalidInputError
from lln.precision import cast_for_autocast


def checked_call(call: Call, operation: str, enable_gqa: bool) -> Call:
    """The call, cast for autocast, after every argument has been checked, each once.

    Args:
        call: The arguments as an entry point got them: ``block_size`` of ``"lln_diag"`` and
            ``group_size`` may be None.
        operation: The name of the entry point, for messages.
        enable_gqa: Whether key and value may have fewer heads than query.
    """
    query, key, value = cast_for_autocast(*call.qkv)
    checks.check_qkv(query, key, value, layout="dense", enable_gqa=enable_gqa)
    if call.kind == "pages" and call.is_causal is True:
        check_last_queries(query, key, operation)
    elif call.kind != "lln":
        checks.check_self_attention(query, key, operation)
    checks.check_key_mask(call.key_mask, key)
    return _CHECKS[call.kind](_known(call, query, key, value))


def checked_packed_call(call: Call, max_seqlen: int | None, enable_gqa: bool) -> Call:
    """`checked_call` of packed sequences, which lie where ``bounds`` say.

    Args:
        call: As of `checked_call`; without ``longest``, which it gets here.
        max_seqlen: Length of the longest sequence, if known.
        enable_gqa: As of `checked_call`.
    """
    query, key, value = cast_for_autocast(*call.qkv)
    checks.check_qkv(query, key, value, layout="packed", enable_gqa=enable_gqa)
    bounds: Any = call.bounds
    longest = check_bounds(bounds, max_seqlen, call.key_mask, query)
    return _CHECKS[call.kind](_known(call, query, key, value, longest=longest))


def _known(call: Call, query: Tensor, key: Tensor, value: Tensor, **known: Any) -> Call:
    """The call with what casting and checking found, copied at most once: small calls feel it."""
    given: int | None = call.block_size
    if call.kind == "lln_diag" and given is None:
        known["block_size"] = query.shape[-1]
    is_cast = query is not call.query or key is not call.key or value is not call.value
    if not (is_cast or known):
        return call
    return call.replace(query=query, key=key, value=value, **known)


def _check_lln(call: Call) -> Call:
    _check_numbers(call, call.matching)
    if call.is_causal and call.bounds is None:
        checks.check_causal(call.is_causal, call.query.shape[2], call.key.shape[2])
    return call


def _check_diag(call: Call) -> Call:
    checks.check_block_size(call.block_size)
    return _check_softmax(call)


def _check_window(call: Call) -> Call:
    checks.check_count("window", call.window, least=0)
    return _check_softmax(call)


def _check_pages(call: Call) -> Call:
    check_pages(call)
    return _check_window(call)


def _check_softmax(call: Call) -> Call:
    checks.check_scale(call.scale)
    checks.check_dropout(call.dropout_p)
    checks.check_flag("is_causal", call.is_causal)
    return call


def _check_lln_diag(call: Call) -> Call:
    _check_numbers(call, call.matching)
    checks.check_blocks(call.block_size, call.scale)
    out_shape = (*call.query.shape[:-1], call.value.shape[-1])
    checks.check_mix(call.mix, out_shape, call.query.device)
    return call


def _check_lln_keys(call: Call) -> Call:
    query, keys = call.query, call.keys
    check_not_causal(call.is_causal)
    check_choice("matching", call.matching, KEYS_MATCHING)
    _check_numbers(call, "entropy")
    check_offset(call.offset, call.samples, query.shape[1], query.device)
    checks.check_blocks(call.block_size, call.scale)
    group = check_group_size(call.group_size, call.block_size)
    call = call.replace(group_size=group)
    groups = groups_in(call.with_fitted_blocks()) if isinstance(keys, Tensor) else ()
    check_keys(keys, groups, query.device)
    return call


def groups_in(call: Call) -> tuple[int, ...]:
    """Which groups of queries choose keys: ``(B, H, G)``, packed ``(H, G)``."""
    size, rows = call.block_size, call.block_size // call.group_size
    if call.bounds is not None:
        return call.query.shape[1], (call.query.shape[0] // size + call.samples) * rows
    batch, heads, tokens, _ = call.query.shape
    return batch, heads, blocks_in(tokens, size, call.key_mask is not None) * rows


def _check_numbers(call: Call, matching: str) -> None:
    """Refuse α without β, causal attention with statistics of its own sequence, and the rest."""
    checks.check_matching(matching)
    checks.check_dropout(call.dropout_p)
    checks.check_flag("is_causal", call.is_causal)
    alpha, beta = call.alpha, call.beta
    if (alpha is None) != (beta is None):
        given, missing = ("alpha", "beta") if beta is None else ("beta", "alpha")
        raise InvalidInputError(
            f"{given} was given without {missing}; give both, or neither to match the moments."
        )
    if alpha is None and call.is_causal:
        raise CausalStatisticsError(
            "causal attention cannot take alpha and beta from the sequence it processes, because "
            "a statistic over all tokens lets every row see the future; pass alpha and beta "
            "(fixed, learned, or from lln.match_moments on other data)."
        )
    if alpha is not None:
        heads, key_heads, device = call.query.shape[1], call.key.shape[1], call.query.device
        checks.check_temperature("alpha", alpha, call.samples, (heads,), device)
        checks.check_temperature("beta", beta, call.samples, (heads, key_heads), device)


_CHECKS = {
    "lln": _check_lln,
    "diag": _check_diag,
    "window": _check_window,
    "pages": _check_pages,
    "lln_diag": _check_lln_diag,
    "lln_keys": _check_lln_keys,
}
