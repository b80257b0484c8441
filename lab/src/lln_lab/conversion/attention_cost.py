"""What a layer's attention costs with a number of exact keys: counted, and measured here.

Counted are the multiplications of one forward call, per token and head:

    softmax       N (D + E), with a window of w tokens to each side (2 w + 1)(D + E)
    exact keys    (W + K)(D + E)  +  2 D (E + 1)  +  N D / g
                  block and keys     slots           selection

The slots are made and read once each; g queries share what is selected. Causal attention has half
of N. Sorting and memory are not counted: measure before you rely on it.

Dimension legend: N tokens, D head width, E value width, W tokens in a block, K keys per group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from lln.functional.exact_keys import lln_keys_attention
from lln.functional.windows import window_attention
from lln.integrations.attention_call import AttentionCall

# Lengths of which the report says what they cost.
LENGTHS = (512, 2048, 8192)

# A call that is expected to take longer is not measured.
MOST_SECONDS = 2.0


@dataclass(frozen=True)
class AttentionShape:
    """What the cost of a layer's attention depends on, besides tokens and keys.

    Attributes:
        heads: H.
        key_heads: Hk.
        width: D.
        value_width: E.
        block_size: W.
        group_size: Queries that share their keys.
        is_causal: Whether a query sees only earlier keys.
        impl: As in `lln.lln_attention`.
        dtype: Of the activations.
        device: Where they are.
        window: Of a layer with a sliding window, which keeps it: tokens to a side.
    """

    heads: int
    key_heads: int
    width: int
    value_width: int
    block_size: int
    group_size: int
    is_causal: bool
    impl: str
    dtype: torch.dtype
    device: torch.device
    window: int | None = None

    @classmethod
    def of(cls, call: AttentionCall) -> AttentionShape:
        """The shape of a call."""
        return cls(
            heads=call.query.shape[1],
            key_heads=call.key.shape[1],
            width=call.query.shape[3],
            value_width=call.value.shape[3],
            block_size=call.block_size,
            group_size=call.group_size,
            is_causal=call.is_causal,
            impl=call.settings.impl,
            dtype=call.query.dtype,
            device=call.query.device,
            window=None if call.window is None else call.window - 1,
        )

    def operations(self, tokens: int, keys: int | None) -> float:
        """Multiplications of one call on one sequence; None = softmax attention, or its window."""
        per_token = self._softmax(tokens) if keys is None else self._keys(tokens, keys)
        return tokens * self.heads * per_token

    def _softmax(self, tokens: int) -> float:
        seen = tokens / 2 if self.is_causal else tokens
        if self.window is not None:
            seen = min(seen, self.window * (1 if self.is_causal else 2) + 1)
        return seen * (self.width + self.value_width)

    def _keys(self, tokens: int, keys: int) -> float:
        block = min(self.block_size, tokens)
        exact = block + min(keys, tokens - block)
        slots = 2 * self.width * (self.value_width + 1)
        scored = tokens * self.width / self.group_size if keys > 0 else 0.0
        return exact * (self.width + self.value_width) + slots + scored


def measure_calls(
    shape: AttentionShape,
    keys: int | None,
    lengths: tuple[int, ...] = LENGTHS,
    most_seconds: float = MOST_SECONDS,
) -> dict[int, float | None]:
    """Seconds of one attention call on one random sequence, by its length.

    Args:
        shape: Of the layer.
        keys: How many exact keys; None = softmax attention.
        lengths: Ascending.
        most_seconds: A length is None if its call is expected to take longer, by what the length
            before it took.
    """
    found: dict[int, float | None] = {}
    expected = 0.0
    for index, tokens in enumerate(lengths):
        if expected > most_seconds:
            found[tokens] = None
            continue
        seconds = found[tokens] = _seconds(_call(shape, tokens, keys), shape.device)
        if index + 1 < len(lengths):
            growth = shape.operations(lengths[index + 1], keys) / shape.operations(tokens, keys)
            expected = seconds * growth
    return found


def _call(shape: AttentionShape, tokens: int, keys: int | None) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)

    def noise(heads: int, width: int) -> torch.Tensor:
        drawn = torch.randn(1, heads, tokens, width, generator=generator)
        return drawn.to(shape.device, shape.dtype)

    query = noise(shape.heads, shape.width)
    key, value = noise(shape.key_heads, shape.width), noise(shape.key_heads, shape.value_width)
    if shape.window is not None:
        return lambda: window_attention(
            query,
            key,
            value,
            window=shape.window or 0,
            is_causal=shape.is_causal,
            enable_gqa=True,
            impl=shape.impl,
        )
    if keys is None:
        return lambda: F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=shape.is_causal,
            enable_gqa=shape.heads != shape.key_heads,
        )
    return lambda: lln_keys_attention(
        query,
        key,
        value,
        alpha=1.0,
        beta=1.0,
        offset=0.0,
        block_size=shape.block_size,
        keys=keys,
        group_size=shape.group_size,
        enable_gqa=True,
        impl=shape.impl,
    )


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call: the fastest of three after a first one, or the first if it is slow."""
    first = _once(call, device)
    # On a GPU the first call may compile, however short the others are.
    if device.type == "cpu" and first > 0.5:
        return first
    # Whatever else the machine does makes calls slower, never faster.
    return min(_once(call, device) for _ in range(3))


def _once(call: Callable[[], object], device: torch.device) -> float:
    with torch.no_grad():
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
