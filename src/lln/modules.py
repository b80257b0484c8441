"""Modules: the attention core with its own α, β, and drop-ins for ``nn.MultiheadAttention``.

Dimension legend: B batch, H heads, T queries, S keys, D head width, E value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lln import checks
from lln.attention import (
    block_diagonal_attention,
    lln_attention,
    lln_diag_attention,
    repeat_heads,
)
from lln.dropout import drop_keys
from lln.errors import InvalidInputError
from lln.precision import cast_for_autocast
from lln.statistics import make_statistics

JOINS = ("average", "scale", "ratio", "gate", "heads")


class LLNCore(nn.Module):
    """LLN attention over ready-made heads, with its own source of α and β.

    Args:
        num_heads: H.
        head_dim: D.
        matching: Criterion of matching (see `lln.match_moments`).
        statistics: ``"sample"`` (matched to every sample and head), ``"running"`` (to a running
            average, frozen in eval mode), ``"fixed"`` or ``"learned"`` α, β per head.
        alpha: Value of ``"fixed"``, start of ``"learned"``; a number or H values.
        beta: Likewise.
        momentum: Weight of a new batch in ``"running"``.
        dropout: Probability to drop a whole key in training (see `lln.dropout`).
        impl: As in `lln.lln_attention`.
        device: Where buffers and parameters live.
    """

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
        super().__init__()
        checks.check_dropout(dropout)
        checks.check_impl(impl)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.dropout, self.impl = dropout, impl
        self.statistics = make_statistics(
            statistics,
            num_heads,
            head_dim,
            matching=matching,
            alpha=alpha,
            beta=beta,
            momentum=momentum,
            device=device,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """``[B, H, T, D]``, ``[B, Hk, S, D]``, ``[B, Hk, S, E]`` → ``[B, H, T, E]``."""
        alpha, beta = self._temperatures(query, key, value, key_mask, is_causal)
        return lln_attention(
            query,
            key,
            value,
            alpha=alpha,
            beta=beta,
            key_mask=key_mask,
            dropout_p=self._dropout_p(),
            is_causal=is_causal,
            enable_gqa=True,
            impl=self.impl,
        )

    def _temperatures(
        self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        query, key, value = cast_for_autocast(query, key, value)
        checks.check_qkv(query, key, value, layout="dense", enable_gqa=True)
        checks.check_key_mask(key_mask, key)
        if query.shape[1] != self.num_heads:
            raise InvalidInputError(
                f"query must have {self.num_heads} heads, got {query.shape[1]}."
            )
        return self.statistics(query, key, key_mask, is_causal)

    def _dropout_p(self) -> float:
        return self.dropout if self.training else 0.0

    def extra_repr(self) -> str:
        """The settings, for ``print(module)``."""
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, dropout={self.dropout}"


class LLNDiagCore(LLNCore):
    """LLN and block-diagonal softmax attention joined, over ready-made heads (Figure 3).

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
        super().__init__(num_heads, head_dim, device=device, **options)
        if join not in JOINS:
            raise InvalidInputError(
                f"join must be one of {', '.join(map(repr, JOINS))}, got {join!r}."
            )
        self.join = join
        self.block_size = head_dim if block_size is None else block_size
        checks.check_block_size(self.block_size)
        channels = (num_heads, 1, head_dim if value_dim is None else value_dim)
        if join in ("scale", "ratio"):
            self.lln_scale = nn.Parameter(torch.full(channels, 0.5, device=device))
        if join == "scale":
            self.diag_scale = nn.Parameter(torch.full(channels, 0.5, device=device))
        if join == "gate":
            # Zeros: the gate opens as the paper's average and departs from it by learning.
            self.gate_weight = nn.Parameter(torch.zeros(num_heads, head_dim, device=device))
            self.gate_bias = nn.Parameter(torch.zeros(num_heads, device=device))
        if lln_heads is not None and join != "heads":
            raise InvalidInputError(f"lln_heads goes with join='heads', not {join!r}.")
        self.lln_heads = (num_heads + 1) // 2 if lln_heads is None else lln_heads
        if not 0 <= self.lln_heads <= num_heads:
            raise InvalidInputError(
                f"lln_heads must be between 0 and num_heads = {num_heads}, got {lln_heads}."
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """``[B, H, T, D]``, ``[B, Hk, T, D]``, ``[B, Hk, T, E]`` → ``[B, H, T, E]``."""
        alpha, beta = self._temperatures(query, key, value, key_mask, is_causal)
        shared: dict[str, Any] = {"key_mask": key_mask, "is_causal": is_causal, "enable_gqa": True}
        long = {"alpha": alpha, "beta": beta, "impl": self.impl, **shared}
        short = {"block_size": self.block_size, **shared}
        if self.join == "heads":
            return self._by_head(query, key, value, long, short)
        if self.join == "scale":
            value = self._drop(value)
            long_range = lln_attention(query, key, value, **long)
            short_range = block_diagonal_attention(query, key, value, **short)
            out = self.lln_scale * long_range + self.diag_scale * short_range
            return out.to(long_range.dtype)
        return lln_diag_attention(
            query, key, value, mix=self._mix(query), dropout_p=self._dropout_p(), **(long | short)
        )

    def extra_repr(self) -> str:
        """The settings, for ``print(module)``."""
        return f"{super().extra_repr()}, join={self.join!r}, block_size={self.block_size}"

    def _mix(self, query: Tensor) -> float | Tensor:
        if self.join == "ratio":
            return self.lln_scale
        if self.join == "gate":
            logits = torch.einsum("bhtd,hd->bht", query, self.gate_weight.to(query.dtype))
            return (logits + self.gate_bias[:, None]).sigmoid().unsqueeze(-1)
        return 0.5

    def _drop(self, value: Tensor) -> Tensor:
        """Drop keys once for both branches."""
        return drop_keys(value, self._dropout_p())

    def _by_head(
        self, query: Tensor, key: Tensor, value: Tensor, long: dict[str, Any], short: dict[str, Any]
    ) -> Tensor:
        key, value = repeat_heads(key, self.num_heads), repeat_heads(value, self.num_heads)
        split = [self.lln_heads, self.num_heads - self.lln_heads]
        queries, keys, values = (tensor.split(split, 1) for tensor in (query, key, value))
        own = {
            name: scale if scale.shape[1] == 1 else scale[:, : self.lln_heads]
            for name, scale in (("alpha", long["alpha"]), ("beta", long["beta"]))
        }
        long |= own | {"dropout_p": self._dropout_p()}
        short |= {"dropout_p": self._dropout_p()}
        return torch.cat(
            [
                lln_attention(queries[0], keys[0], values[0], **long),
                block_diagonal_attention(queries[1], keys[1], values[1], **short),
            ],
            dim=1,
        )


class LLNAttention(nn.Module):
    """Multi-head LLN attention with projections, after ``nn.MultiheadAttention``.

    Parameter names are those of ``nn.MultiheadAttention``, so that its state dict loads. The N×N
    weights never exist: ``need_weights`` and ``attn_mask`` are refused.

    Args:
        embed_dim: Width of the model.
        num_heads: H; divides embed_dim.
        dropout: Probability to drop a whole key in training (see `lln.dropout`).
        bias: Whether the projections have biases.
        kdim: Width of key; None = embed_dim.
        vdim: Width of value; None = embed_dim.
        batch_first: Whether tensors come as ``[B, T, embed_dim]`` rather than
            ``[T, B, embed_dim]``.
        device: Where the parameters live.
        dtype: Type of the projections' parameters; statistics stay float32.
        **options: As in `LLNCore`: ``matching``, ``statistics``, ``alpha``, ``beta``,
            ``momentum``, ``impl``.

    Example:
        >>> layer = LLNAttention(32, 4, batch_first=True)
        >>> x = torch.randn(2, 10, 32)
        >>> padding = torch.zeros(2, 10, dtype=torch.bool)
        >>> out, weights = layer(x, x, x, key_padding_mask=padding)
        >>> out.shape, weights
        (torch.Size([2, 10, 32]), None)
    """

    core_class: type[LLNCore] = LLNCore

    # nn.TransformerEncoderLayer looks here before it takes its fused softmax path, which would
    # bypass this module without a word.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        """Create the projections and the core."""
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise InvalidInputError(
                f"embed_dim must be a positive multiple of num_heads, got {embed_dim} and "
                f"{num_heads}."
            )
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        self.head_dim = embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        factory = {"device": device, "dtype": dtype}
        if self.kdim == embed_dim and self.vdim == embed_dim:
            self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, **factory))
        else:
            self.register_parameter("in_proj_weight", None)
            self.q_proj_weight = nn.Parameter(torch.empty(embed_dim, embed_dim, **factory))
            self.k_proj_weight = nn.Parameter(torch.empty(embed_dim, self.kdim, **factory))
            self.v_proj_weight = nn.Parameter(torch.empty(embed_dim, self.vdim, **factory))
        if bias:
            self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim, **factory))
        else:
            self.register_parameter("in_proj_bias", None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self.core = self.core_class(
            num_heads, self.head_dim, dropout=dropout, device=device, **options
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as ``nn.MultiheadAttention`` does: Xavier weights, zero biases."""
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("weight"):
                nn.init.xavier_uniform_(parameter)
            else:
                nn.init.zeros_(parameter)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Attend, with the argument order of ``nn.MultiheadAttention``.

        Args:
            query: ``[T, B, embed_dim]``, or ``[B, T, embed_dim]`` if batch_first; or unbatched
                ``[T, embed_dim]``.
            key: Likewise with S tokens; None = query.
            value: Likewise; None = key.
            key_padding_mask: ``[B, S]``, in the sense of ``nn.MultiheadAttention``: True (or −inf)
                = ignore. It is turned into this library's ``key_mask``.
            need_weights: Must be False.
            attn_mask: Must be None; use ``is_causal``.
            average_attn_weights: Unused, kept for the argument order.
            is_causal: Whether row i sees keys 0 … i only.

        Returns:
            ``(output, None)``, output shaped like query.
        """
        if need_weights:
            raise InvalidInputError(
                "need_weights=True cannot be met: LLN attention never forms the N×N weights; "
                "lln.reference.lln_matrix computes them for inspection."
            )
        if attn_mask is not None:
            raise InvalidInputError(
                "attn_mask is N×N and cannot be applied in linear time; use key_padding_mask for "
                "padding and is_causal=True for causal attention."
            )
        key = query if key is None else key
        value = key if value is None else value
        unbatched = query.dim() == 2
        batch_axis = 0 if self.batch_first else 1
        if unbatched:
            query, key, value = (part.unsqueeze(batch_axis) for part in (query, key, value))
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.unsqueeze(0)
        if not self.batch_first:
            query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        heads = [
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self._project(query, key, value)
        ]
        key_mask = None if key_padding_mask is None else _key_mask_of_padding(key_padding_mask)
        out = self.core(*heads, key_mask=key_mask, is_causal=is_causal)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        out = out if self.batch_first else out.transpose(0, 1)
        return (out.squeeze(batch_axis) if unbatched else out), None

    def extra_repr(self) -> str:
        """The settings, for ``print(module)``."""
        return f"embed_dim={self.embed_dim}, batch_first={self.batch_first}"

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        if self.in_proj_weight is not None:
            if query is key and key is value:
                return list(F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1))
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [
            F.linear(part, weight, bias)
            for part, weight, bias in zip((query, key, value), weights, biases, strict=True)
        ]


class LLNDiagAttention(LLNAttention):
    """Multi-head LLN + block-diagonal attention with projections (Figure 3).

    Args:
        embed_dim: Width of the model.
        num_heads: H; divides embed_dim.
        **options: As in `LLNAttention` and `LLNDiagCore`: ``join``, ``block_size``, ``lln_heads``
            and the rest.

    Example:
        >>> layer = LLNDiagAttention(32, 4, batch_first=True, join="gate", block_size=4)
        >>> layer(torch.randn(2, 10, 32))[0].shape
        torch.Size([2, 10, 32])
    """

    core_class = LLNDiagCore


def _key_mask_of_padding(key_padding_mask: Tensor) -> Tensor:
    """Turn nn.MultiheadAttention's mask (True or −inf = ignore) into ours (True = attend)."""
    if key_padding_mask.dtype == torch.bool:
        return ~key_padding_mask
    if not key_padding_mask.dtype.is_floating_point:
        raise InvalidInputError(
            f"key_padding_mask must be bool (True = ignore) or floating point (−inf = ignore), "
            f"got {key_padding_mask.dtype}."
        )
    attend = key_padding_mask == 0
    if checks.values_are_readable(key_padding_mask):
        ignored = key_padding_mask <= torch.finfo(key_padding_mask.dtype).min
        if not bool((attend | ignored).all()):
            raise InvalidInputError(
                "a floating-point key_padding_mask may hold only 0 and −inf: LLN attention can "
                "drop a key but has no score to add a bias to."
            )
    return attend
