"""Attention cores without projections: heads in, heads out, with their own α, β and join.

Dimension legend: B batch, H heads, T queries, S keys, D head width, E value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lln import checks
from lln.checks.call import Call
from lln.checks.names import check_choice
from lln.checks.signatures import check_options, explain_misfits
from lln.eager.dropout import drop_keys
from lln.eager.run import repeat_heads
from lln.errors import InvalidInputError
from lln.functional.run import attend
from lln.nn.temperatures import make_statistics
from lln.precision import cast_for_autocast

JOINS = ("average", "scale", "ratio", "gate", "heads")


class AttentionCore(nn.Module):
    """What every core has: its sizes and options, and the checks of its inputs.

    Args:
        num_heads: H.
        head_dim: D.
        dropout: Probability to drop a whole key in training (see `lln.eager.dropout`).
        impl: As in `lln.lln_attention`.
    """

    def __init__(
        self, num_heads: int, head_dim: int, *, dropout: float = 0.0, impl: str = "auto"
    ) -> None:
        """Check the options."""
        super().__init__()
        checks.check_count("num_heads", num_heads)
        checks.check_count("head_dim", head_dim)
        checks.check_dropout(dropout)
        checks.check_impl(impl)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.dropout, self.impl = dropout, impl

    @explain_misfits
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """``[B, H, T, D]``, ``[B, Hk, S, D]``, ``[B, Hk, S, E]`` → ``[B, H, T, E]``.

        Only `LLNCore` takes other tokens as keys; for the rest S = T.
        """
        return self._attend(self._checked(query, key, value, key_mask, is_causal))

    def _attend(self, call: Call) -> Tensor:
        """The attention of a checked call, ``[B, H, T, E]``."""
        raise NotImplementedError

    def _checked(
        self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, is_causal: bool
    ) -> Call:
        """The inputs as a call, cast for autocast and checked once; α and β are still to come."""
        query, key, value = cast_for_autocast(query, key, value)
        checks.check_flag("is_causal", is_causal)
        checks.check_qkv(query, key, value, layout="dense", enable_gqa=True)
        checks.check_key_mask(key_mask, key)
        if query.shape[1] != self.num_heads:
            raise InvalidInputError(
                f"query must have {self.num_heads} heads, got {query.shape[1]}."
            )
        if query.shape[3] != self.head_dim:
            raise InvalidInputError(
                f"query must have head width {self.head_dim}, got {query.shape[3]}."
            )
        dropout_p = self.dropout if self.training else 0.0
        options: dict[str, Any] = {"key_mask": key_mask, "is_causal": is_causal}
        return Call("lln", query, key, value, dropout_p=dropout_p, **options)

    def extra_repr(self) -> str:
        """The settings, for ``print(module)``."""
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, dropout={self.dropout}"


class LLNCore(AttentionCore):
    """LLN attention over heads that are already projected, with its own source of α and β.

    Args:
        num_heads: H.
        head_dim: D.
        matching: Criterion of matching (see `lln.match_moments`).
        statistics: ``"sample"`` (matched to every sample and head), ``"running"`` (to a running
            average, frozen in eval mode), ``"fixed"`` or ``"learned"`` α, β per head.
        alpha: Value of ``"fixed"``, start of ``"learned"``; a number or H values.
        beta: Likewise.
        momentum: Weight of a new batch in ``"running"``.
        dropout: Probability to drop a whole key in training (see `lln.eager.dropout`).
        impl: As in `lln.lln_attention`.
        device: Where buffers and parameters live.
    """

    @explain_misfits
    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        matching: str = "variance",
        statistics: str = "sample",
        alpha: float | Tensor | None = None,
        beta: float | Tensor | None = None,
        momentum: float = 0.1,
        dropout: float = 0.0,
        impl: str = "auto",
        device: torch.device | str | None = None,
    ) -> None:
        """Build the source of α, β."""
        super().__init__(num_heads, head_dim, dropout=dropout, impl=impl)
        numbers: dict[str, Any] = {"matching": matching, "alpha": alpha, "beta": beta}
        options: dict[str, Any] = {"momentum": momentum, "impl": impl, "device": device}
        self.statistics = make_statistics(statistics, num_heads, head_dim, **numbers, **options)

    def _attend(self, call: Call) -> Tensor:
        if call.is_causal:
            checks.check_causal(call.is_causal, call.query.shape[2], call.key.shape[2])
        alpha, beta = self.statistics(call.query, call.key, call.key_mask, call.is_causal)
        return attend(call.replace(alpha=alpha, beta=beta), self.impl)


class LLNDiagCore(LLNCore):
    """LLN combined with block-diagonal softmax attention, over projected heads (Figure 3).

    Args:
        num_heads: H.
        head_dim: D.
        join: How the two outputs become one:
            ``"average"``: their mean, as in the paper;
            ``"scale"``: r·LLN + p·Diag with learned r, p per head and channel (authors' code);
            ``"ratio"``: r·LLN + (1 − r)·Diag with learned r per head and channel (authors' code);
            ``"gate"``: the same with r = sigmoid(q·g + b) per token and head;
            ``"heads"``: the first ``lln_heads`` heads are LLN, the others block-diagonal.
        block_size: Tokens in a diagonal block; None = D.
        value_dim: E; None = D.
        lln_heads: Number of LLN heads of join ``"heads"``; None = half of them.
        device: Where buffers and parameters live.
        **options: As in `LLNCore`.
    """

    @explain_misfits
    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        join: str = "average",
        block_size: int | None = None,
        value_dim: int | None = None,
        lln_heads: int | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        """Build the source of α, β and the parameters of the join."""
        check_options(self, options, type(self))
        super().__init__(num_heads, head_dim, device=device, **options)
        check_choice("join", join, JOINS)
        self.join = join
        self.block_size = head_dim if block_size is None else block_size
        checks.check_block_size(self.block_size)
        self.value_dim = head_dim if value_dim is None else value_dim
        checks.check_count("value_dim", self.value_dim)
        channels = (num_heads, 1, self.value_dim)
        if join in ("scale", "ratio"):
            self.lln_scale = nn.Parameter(torch.full(channels, 0.5, device=device))
        if join == "scale":
            self.diag_scale = nn.Parameter(torch.full(channels, 0.5, device=device))
        if join == "gate":
            # Zeros, so that the gate starts as the paper's average.
            self.gate_weight = nn.Parameter(torch.zeros(num_heads, head_dim, device=device))
            self.gate_bias = nn.Parameter(torch.zeros(num_heads, device=device))
        if lln_heads is not None and join != "heads":
            raise InvalidInputError(f"lln_heads goes with join='heads', not {join!r}.")
        if lln_heads is not None and not isinstance(lln_heads, int):
            checks.check_count("lln_heads", lln_heads, least=0)
        self.lln_heads = (num_heads + 1) // 2 if lln_heads is None else lln_heads
        if not 0 <= self.lln_heads <= num_heads:
            raise InvalidInputError(
                f"lln_heads must be between 0 and num_heads = {num_heads}, got {lln_heads}."
            )

    @property
    def first_block_head(self) -> int:
        """Which head is the first that attends to blocks."""
        return self.lln_heads if self.join == "heads" else 0

    def _attend(self, call: Call) -> Tensor:
        query, key, value = call.qkv
        checks.check_self_attention(query, key, type(self).__name__)
        if self.join in ("scale", "ratio") and value.shape[3] != self.value_dim:
            raise InvalidInputError(
                f"value must have width {self.value_dim}, got {value.shape[3]}; give value_dim."
            )
        alpha, beta = self.statistics(query, key, call.key_mask, call.is_causal)
        blocks = {"mix": self._mix(query, call.key_mask), "block_size": self.block_size}
        call = call.replace(kind="lln_diag", alpha=alpha, beta=beta, **blocks)
        if self.join == "heads":
            return self._by_head(call)
        if self.join == "scale":
            return self._by_scale(call)
        return attend(call, self.impl)

    def extra_repr(self) -> str:
        """The settings, for ``print(module)``."""
        return f"{super().extra_repr()}, join={self.join!r}, block_size={self.block_size}"

    def _mix(self, query: Tensor, key_mask: Tensor | None) -> float | Tensor:
        if self.join == "ratio":
            return self.lln_scale
        if self.join == "gate":
            if key_mask is not None and key_mask.shape[1] == query.shape[2]:
                # Values in padding must not reach the gate's gradient.
                query = torch.where(key_mask[:, None, :, None], query, 0.0)
            logits = torch.einsum("bhtd,hd->bht", query, self.gate_weight.to(query.dtype))
            return (logits + self.gate_bias[:, None]).sigmoid().unsqueeze(-1)
        return 0.5

    def _by_scale(self, call: Call) -> Tensor:
        # The same keys are dropped from both parts.
        call = call.replace(value=drop_keys(call.value, call.dropout_p), dropout_p=0.0)
        long_range, short_range = (
            attend(_long_range(call), self.impl),
            attend(_blocks(call), self.impl),
        )
        out = self.lln_scale * long_range + self.diag_scale * short_range
        return out.to(long_range.dtype)

    def _by_head(self, call: Call) -> Tensor:
        split = [self.lln_heads, self.num_heads - self.lln_heads]
        whole = (repeat_heads(side, self.num_heads) for side in call.qkv)
        first, rest = (
            dict(zip(("query", "key", "value"), sides, strict=True))
            for sides in zip(*(side.split(split, 1) for side in whole), strict=True)
        )
        first |= {
            name: side if side.shape[1] == 1 else side[:, : self.lln_heads]
            for name, side in (("alpha", call.alpha), ("beta", call.beta))
        }
        long_range = attend(_long_range(call.replace(**first)), self.impl)
        short_range = attend(_blocks(call.replace(**rest)), self.impl)
        return torch.cat([long_range, short_range], dim=1)


def _long_range(call: Call) -> Call:
    """The LLN part of a call by itself."""
    return call.replace(kind="lln", mix=1.0, block_size=0)


def _blocks(call: Call) -> Call:
    """The diagonal part of a call by itself."""
    return call.replace(kind="diag", alpha=None, beta=None, mix=1.0)
