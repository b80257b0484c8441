"""The entry points of attention with exact keys: dense, packed, and the choice of keys alone.

Dimension legend: as in `lln.checks.call`, with T tokens, G groups of queries, K keys per group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln import checks
from lln.checks.call import Call
from lln.checks.signatures import explain_misfits
from lln.functional import ways
from lln.functional.checked_call import checked_call, checked_packed_call, groups_in
from lln.functional.key_calls import choose_for
from lln.functional.run import attend
from lln.precision import without_autocast
from lln.tracing import is_compiling


@explain_misfits
def lln_keys_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    matching: str = "rest",
    block_size: int = 64,
    keys: int | Tensor = 64,
    group_size: int | None = None,
    offset: float | Tensor | None = None,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    impl: str = "auto",
) -> Tensor:
    """One softmax over the own block, K chosen keys and the D slots of the LLN summary.

        logits_i = [ q_i·k_j/√D, j in the block or chosen | αq_if + L_f + g + ln ρ, f = 1 … D ]
        out_i = softmax(logits_i) · [ v_j | C_f ]

    for keys whose mean was taken off (as in softmax, a vector added to all keys changes nothing).
    L and C are the summary of `KeySummary`, g is the offset and ρ the share of keys that are
    neither in the block nor chosen. The more keys, the closer to softmax attention; with every key
    exact it *is* softmax attention, and with ``keys=0`` near tokens and slots share one normaliser.

    Args:
        query: ``[B, H, T, D]``, any strides.
        key: ``[B, Hk, T, D]``.
        value: ``[B, Hk, T, E]``.
        alpha: A positive number, or a tensor that broadcasts to ``[B, H, 1, 1]``; may carry
            gradients. None = from ``matching``.
        beta: Likewise, or per key head.
        matching: ``"rest"``, half of what ``"entropy"`` gives, because the slots carry only what is
            left beside the exact keys; or a criterion of `match_moments`.
        block_size: Tokens in a block; the last one may be short.
        keys: How many keys outside the block every group of queries sees one by one, or their
            indices ``[B, H, G, K]`` as `choose_keys` returns them (-1 = none; keys that are
            repeated, masked or in the block count once or not at all).
        group_size: Queries that share their chosen keys; None = a block.
        offset: g, what puts the mass of the slots on the scale of softmax scores: a number or a
            tensor that broadcasts to ``[B, H, 1, 1]``, may carry gradients. None = by mass matching
            (`lln.matching.mass`), right for Gaussian inputs; `lln.calibrate_keys` finds it on real
            ones.
        key_mask: bool ``[B, T]``, True = attend. It also says which queries count in statistics and
            in the choice of keys. Blocks are counted from the first valid token.
        is_causal: Must be False; `lln.page_attention` is causal.
        scale: Factor of the scores; None = 1/√D.
        enable_gqa: Whether H may be a multiple of Hk; every query head chooses its own keys.
        impl: As in `lln_attention`.

    Returns:
        ``[B, H, T, E]`` in the dtype of query. A sequence without any valid key gives zeros.

    Example:
        >>> import torch
        >>> query, key, value = torch.randn(3, 1, 2, 200, 16)
        >>> softmax = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        >>> exact = lln_keys_attention(query, key, value, keys=200)
        >>> torch.allclose(exact, softmax, atol=1e-5)
        True
    """
    numbers = {"alpha": alpha, "beta": beta, "matching": matching, "offset": offset}
    form = {"block_size": block_size, "keys": keys, "group_size": group_size}
    options: dict[str, Any] = {"key_mask": key_mask, "is_causal": is_causal, "scale": scale}
    call = Call("lln_keys", query, key, value, **options, **numbers, **form)
    return attend(checked_call(call, "lln_keys_attention", enable_gqa), impl)


@explain_misfits
def lln_keys_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int | None = None,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    matching: str = "rest",
    block_size: int = 64,
    keys: int | Tensor = 64,
    group_size: int | None = None,
    offset: float | Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_mask: None = None,
    impl: str = "auto",
) -> Tensor:
    """`lln_keys_attention` inside each of several packed sequences.

    Args:
        query: ``[T, H, D]``.
        key: ``[T, Hk, D]``.
        value: ``[T, Hk, E]``.
        cu_seqlens: int32 or int64 ``[n + 1]``: 0, then the end of every sequence.
        max_seqlen: Length of the longest sequence, if known.
        alpha: A positive number, or a tensor that broadcasts to ``[n, H, 1, 1]``; None = from
            ``matching``, per sequence and head.
        beta: Likewise.
        matching: As in `lln_keys_attention`.
        block_size: Tokens in a block; every sequence starts a new one.
        keys: As in `lln_keys_attention`; indices are ``[H, G, K]`` and count packed tokens.
        group_size: As in `lln_keys_attention`.
        offset: As in `lln_keys_attention`, ``[n, H, 1, 1]``.
        is_causal: As in `lln_keys_attention`.
        scale: As in `lln_keys_attention`.
        enable_gqa: As in `lln_keys_attention`.
        key_mask: Refused: packed sequences have no padding to mask.
        impl: As in `lln_keys_attention`. The kernels take sequences padded to similar lengths,
            for which they wait for the values of ``cu_seqlens``; not your own indices, and not
            under a compiler or in a CUDA graph.

    Returns:
        ``[T, H, E]`` in the dtype of query, equal to one call per sequence.
    """
    numbers = {"alpha": alpha, "beta": beta, "matching": matching, "offset": offset}
    form = {"block_size": block_size, "keys": keys, "group_size": group_size}
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "key_mask": key_mask}
    call = Call("lln_keys", query, key, value, bounds=cu_seqlens, **options, **numbers, **form)
    return attend(checked_packed_call(call, max_seqlen, enable_gqa), impl)


@explain_misfits
def choose_keys(
    query: Tensor,
    key: Tensor,
    keys: int = 64,
    *,
    block_size: int = 64,
    group_size: int | None = None,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Which keys outside its block every group of queries should see one by one.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, T, D]``.
        keys: K, how many: those with the largest products with the group's mean query. A group gets
            fewer if fewer can be chosen.
        block_size: Tokens in a block.
        group_size: Queries that share their keys, a divisor of the block size; None = a block.
        key_mask: bool ``[B, T]``; masked keys are never chosen, masked queries do not count.
        is_causal: Must be False, as in `lln_keys_attention`.
        scale: Factor of the softmax scores; a negative one turns the choice around.
        enable_gqa: Whether H may be a multiple of Hk.
        impl: As in `lln_attention`; ``"reference"`` chooses in plain PyTorch.

    Returns:
        int64 ``[B, H, G, K]`` without gradient, ascending by position, -1 where there are fewer.
        Equal scores are taken in the order of positions. G = groups per block × blocks, where
        blocks = ⌈T / block_size⌉, or ⌈(T + block_size - 1) / block_size⌉ with a mask if T > 0.
        A larger block_size counts as the next power of two from T on, of groups and from 64 on.

    Example:
        >>> import torch
        >>> query = key = torch.eye(6).view(1, 1, 6, 6)
        >>> choose_keys(query, key, 2, block_size=3).tolist()
        [[[[3, 4], [0, 1]]]]
    """
    checks.check_count("keys", keys, 0)
    form = {"block_size": block_size, "keys": keys, "group_size": group_size}
    options: dict[str, Any] = {"key_mask": key_mask, "is_causal": is_causal, "scale": scale}
    call = Call("lln_keys", query, key, key, **options, **form)
    call = checked_call(call, "choose_keys", enable_gqa).with_fitted_blocks()
    with torch.no_grad(), without_autocast(query):
        chosen = choose_for(call, ways.prepare(call, impl).impl).long()
    # A trace for every length may have one block more, see `dense_blocks`.
    return chosen[:, :, : groups_in(call)[-1]] if is_compiling() else chosen
