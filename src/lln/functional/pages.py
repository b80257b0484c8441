"""The entry points of attention to a window, sinks and pages: dense, packed, and the choice alone.

Dimension legend: as in `lln.checks.call`; r width of what pages are chosen by, P pages per query.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.checks.call import Call
from lln.checks.signatures import explain_misfits
from lln.functional import ways
from lln.functional.checked_call import checked_call, checked_packed_call
from lln.functional.page_calls import choose_for
from lln.functional.run import attend
from lln.precision import without_autocast

Choice = tuple[Tensor, Tensor]


@explain_misfits
def page_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int = 128,
    sinks: int = 16,
    pages: int | Tensor = 16,
    page_size: int = 16,
    choice: Choice | None = None,
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Softmax attention to the tokens nearby, the first tokens, and the pages that matter most.

        out_i = Σ_j softmax_j(scale · q_i·k_j) v_j
                over |i − j| ≤ window, j < sinks, and the tokens of the pages that query i chose

    under one normaliser, so that this *is* softmax attention, Eq. (1), where these parts hold all
    tokens. The form for decoders and for encoders with rotary positions. Without sinks and pages it
    is `window_attention`.

    Args:
        query: ``[B, H, T, D]``, any strides.
        key: ``[B, Hk, S, D]``; S = T, or more where ``is_causal``: queries are then the last
            tokens, as they are when a cache holds the earlier ones.
        value: ``[B, Hk, S, E]``.
        window: How many tokens a query sees on either side of its own, or before its own if
            ``is_causal``.
        sinks: How many first tokens of its sequence every query sees. Trained decoders rest much of
            their attention on them.
        pages: How many pages every query chooses, or their numbers ``[B, Hk, T, P]`` as
            `choose_pages` returns them: each once, -1 = none.
        page_size: Tokens in a page. Pages are counted from the first valid token.
        choice: Queries ``[B, H, T, r]`` and keys ``[B, Hk, S, r]`` to choose pages by, where that
            is cheaper (`PageIndex` makes them); None = ``query`` and ``key``.
        key_mask: bool ``[B, S]``, True = attend. A masked key has no effect, whatever it holds.
        dropout_p: Probability to drop a whole key (see `lln.eager.dropout`).
        is_causal: Whether a query sees only its own and earlier tokens.
        scale: Factor of the scores; None = 1/√D.
        enable_gqa: Whether H may be a multiple of Hk; the heads of a key head choose together.
        impl: As in `lln_attention`.

    Returns:
        ``[B, H, T, E]`` in the dtype of query. A row that sees no valid key gives zeros. Gradients
        do not flow through the choice.

    Example:
        >>> import torch
        >>> query, key, value = torch.randn(3, 1, 2, 200, 16)
        >>> page_attention(query, key, value, window=16, pages=4, is_causal=True).shape
        torch.Size([1, 2, 200, 16])
    """
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    form: dict[str, Any] = {"window": window, "sinks": sinks, "keys": pages, "page_size": page_size}
    call = Call("pages", query, key, value, key_mask=key_mask, **_sides(choice), **options, **form)
    return attend(checked_call(call, "page_attention", enable_gqa), impl)


@explain_misfits
def page_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    window: int = 128,
    sinks: int = 16,
    pages: int = 16,
    page_size: int = 16,
    choice: Choice | None = None,
    max_seqlen: int | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_mask: None = None,
    impl: str = "auto",
) -> Tensor:
    """`page_attention` inside each of several packed sequences.

    Args:
        query: ``[T, H, D]``.
        key: ``[T, Hk, D]``.
        value: ``[T, Hk, E]``.
        cu_seqlens: int32 or int64 ``[n + 1]``: 0, then the end of every sequence.
        window: As in `page_attention`.
        sinks: Likewise, of every sequence.
        pages: How many pages every query chooses.
        page_size: As in `page_attention`.
        choice: Queries ``[T, H, r]`` and keys ``[T, Hk, r]`` to choose pages by.
        max_seqlen: Length of the longest sequence, if known.
        dropout_p: As in `page_attention`.
        is_causal: Likewise.
        scale: Likewise.
        enable_gqa: Likewise.
        key_mask: Refused: packed sequences have no padding to mask.
        impl: As in `lln_attention`.

    Returns:
        ``[T, H, E]`` in the dtype of query, equal to one call per sequence.

    Example:
        >>> import torch
        >>> query, key, value = torch.randn(3, 100, 2, 8)
        >>> bounds = torch.tensor([0, 30, 100])
        >>> page_attention_varlen(query, key, value, bounds, window=4, pages=2).shape
        torch.Size([100, 2, 8])
    """
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    form: dict[str, Any] = {"window": window, "sinks": sinks, "keys": pages, "page_size": page_size}
    packing = {"key_mask": key_mask, "bounds": cu_seqlens}
    call = Call("pages", query, key, value, **packing, **_sides(choice), **options, **form)
    return attend(checked_packed_call(call, max_seqlen, enable_gqa), impl)


@explain_misfits
def choose_pages(
    query: Tensor,
    key: Tensor,
    pages: int = 16,
    *,
    window: int = 128,
    sinks: int = 16,
    page_size: int = 16,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    impl: str = "auto",
) -> Tensor:
    """The pages that `page_attention` reads for every query.

    A page is worth what its best token is worth: the score of that token with the query, in the
    head where it stands out most from what the query sees anyway. Every token is compared with
    every other one, so the choice is quadratic in the length, with a small constant.

    Args:
        query: ``[B, H, T, r]``.
        key: ``[B, Hk, S, r]``.
        pages: P, how many; a query gets fewer if fewer hold a token that it does not see anyway.
        window: As in `page_attention`.
        sinks: Likewise.
        page_size: Likewise.
        key_mask: Likewise.
        is_causal: Likewise.
        scale: Factor of the scores; a negative one turns the choice around.
        enable_gqa: As in `page_attention`.
        impl: As in `lln_attention`.

    Returns:
        int64 ``[B, Hk, T, P]`` without gradient, ascending, -1 where there are fewer. Of equal
        scores the first pages are taken.

    Example:
        >>> import torch
        >>> key = torch.eye(6).view(1, 1, 6, 6)
        >>> choose_pages(key.flip(2), key, 1, window=0, sinks=0, page_size=2).flatten().tolist()
        [2, 2, 1, 1, 0, 0]
    """
    form: dict[str, Any] = {"window": window, "sinks": sinks, "keys": pages, "page_size": page_size}
    options: dict[str, Any] = {"key_mask": key_mask, "is_causal": is_causal, "scale": scale}
    call = Call("pages", query, key, key, **options, **form)
    call = checked_call(call, "choose_pages", enable_gqa)
    with torch.no_grad(), without_autocast(query):
        prepared = ways.prepare(call, impl)
        return choose_for(call, prepared.impl).long()


def _sides(choice: Choice | None) -> dict[str, Any]:
    """What pages are chosen by, as a call names it."""
    return {} if choice is None else dict(zip(("choice_query", "choice_key"), choice, strict=True))
