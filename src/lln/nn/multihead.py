"""Drop-ins for ``nn.MultiheadAttention``: projections around a core.

Dimension legend: B batch, H heads, T queries, S keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lln import checks
from lln.checks.names import shown
from lln.checks.signatures import check_options, explain_misfits
from lln.checks.tensors import check_tensor
from lln.errors import InvalidInputError
from lln.nn.heads import AttentionCore, LLNCore, LLNDiagCore
from lln.nn.key_heads import LLNKeysCore
from lln.nn.value_convolution import ValueConvolution
from lln.nn.window import PageCore, WindowCore
from lln.precision import autocast_enabled
from lln.tracing import values_are_readable


class ProjectedAttention(nn.Module):
    """Projections around a core; `LLNAttention` says what the arguments are."""

    core_class: type[AttentionCore]

    # nn.TransformerEncoderLayer reads this before it takes its fused softmax path, which would
    # silently bypass this module.
    _qkv_same_embed_dim = False

    @explain_misfits
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
        convolution: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        """Create the projections and the core."""
        super().__init__()
        check_options(self, options, type(self), self.core_class, without=("head_dim",))
        whole = type(embed_dim) is int and type(num_heads) is int
        if not whole or embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise InvalidInputError(
                f"embed_dim must be a positive multiple of num_heads, got {shown(embed_dim)} and "
                f"{shown(num_heads)}."
            )
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        self.head_dim = embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        checks.check_count("kdim", self.kdim)
        checks.check_count("vdim", self.vdim)
        checks.check_count("convolution", convolution, least=0)
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
        self.convolution = (
            ValueConvolution(embed_dim, convolution, **factory) if convolution else None
        )
        options |= {"dropout": dropout, "device": device}
        self.core = self.core_class(num_heads, self.head_dim, **options)
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

    @explain_misfits
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
        checks.check_flag("need_weights", need_weights)
        if need_weights:
            raise InvalidInputError(
                f"need_weights=True cannot be met: {type(self).__name__} never forms the N×N "
                "weights; lln.reference has the equations as N×N matrices, for inspection."
            )
        if attn_mask is not None:
            raise InvalidInputError(
                "attn_mask is N×N and cannot be applied in linear time; use key_padding_mask for "
                "padding and is_causal=True for causal attention."
            )
        if isinstance(query, Tensor) and query.is_nested:
            raise InvalidInputError(
                f"query is a nested tensor, which {type(self).__name__} does not take; build "
                "nn.TransformerEncoder with enable_nested_tensor=False."
            )
        key = query if key is None else key
        value = key if value is None else value
        for name, part, width in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            check_tensor(name, part)
            if part.dim() not in (2, 3) or part.shape[-1] != width:
                raise InvalidInputError(
                    f"{name} must be 3-D (2-D without batch) of width {width}, got shape "
                    f"{checks.shape_of(part)}."
                )
            self._check_weights(name, part)
        if not query.dim() == key.dim() == value.dim():
            raise InvalidInputError(
                "query, key and value must have the same number of dimensions, got "
                f"{query.dim()}, {key.dim()} and {value.dim()}."
            )
        if key_padding_mask is not None:
            check_tensor("key_padding_mask", key_padding_mask)
        unbatched = query.dim() == 2
        batch_axis = 0 if self.batch_first else 1
        if unbatched:
            query, key, value = (part.unsqueeze(batch_axis) for part in (query, key, value))
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.unsqueeze(0)
        if not self.batch_first:
            query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        projected = self._project(query, key, value)
        heads = [part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in projected]
        key_mask = None
        if key_padding_mask is not None:
            key_mask = _key_mask_of_padding(key_padding_mask, key)
        out = self.core(*heads, key_mask=key_mask, is_causal=is_causal).transpose(1, 2).flatten(2)
        if self.convolution is not None:
            if query.shape[1] != key.shape[1]:
                raise InvalidInputError(
                    "convolution adds the values of neighbouring tokens, so there must be as many "
                    f"queries as keys, got {query.shape[1]} and {key.shape[1]}; leave it 0 for "
                    "cross attention."
                )
            out = out + self.convolution(projected[2], key_mask, is_causal)
        out = self.out_proj(out)
        out = out if self.batch_first else out.transpose(0, 1)
        return (out.squeeze(batch_axis) if unbatched else out), None

    def extra_repr(self) -> str:
        """The settings, for ``print(module)``."""
        return f"embed_dim={self.embed_dim}, batch_first={self.batch_first}"

    def _check_weights(self, name: str, part: Tensor) -> None:
        """Refuse what torch would refuse to multiply with the projections."""
        weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
        if part.device != weight.device:
            raise InvalidInputError(
                f"{name} is on {part.device} and the weights of {type(self).__name__} are on "
                f"{weight.device}; move one of them with .to()."
            )
        both = (part.dtype, weight.dtype)
        # Autocast brings all but float64 to one dtype.
        cast = autocast_enabled(part.device.type) and torch.float64 not in both
        if part.dtype != weight.dtype and not (cast and part.dtype.is_floating_point):
            raise InvalidInputError(
                f"{name} is {part.dtype} and the weights of {type(self).__name__} are "
                f"{weight.dtype}; bring both to one dtype with .to()."
            )

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


class LLNAttention(ProjectedAttention):
    """Multi-head LLN attention with projections, after ``nn.MultiheadAttention``.

    Parameter names are those of ``nn.MultiheadAttention``, so that its state dict loads. The N×N
    weights never exist: ``need_weights`` and ``attn_mask`` are refused.

    Args:
        embed_dim: Width of the model.
        num_heads: H; divides embed_dim.
        dropout: Probability to drop a whole key in training (see `lln.eager.dropout`).
        bias: Whether the projections have biases.
        kdim: Width of key; None = embed_dim.
        vdim: Width of value; None = embed_dim.
        batch_first: Whether tensors come as ``[B, T, embed_dim]`` rather than
            ``[T, B, embed_dim]``.
        convolution: Tokens under a depthwise convolution of the values, added to the output: an odd
            number, 0 = none (`lln.nn.value_convolution`). For self-attention only.
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

    core_class = LLNCore


class LLNDiagAttention(ProjectedAttention):
    """Multi-head LLN + block-diagonal attention with projections (Figure 3).

    Arguments are those of `LLNAttention` and `LLNDiagCore`: ``join``, ``block_size``, ``lln_heads``
    and the rest.

    Example:
        >>> layer = LLNDiagAttention(32, 4, batch_first=True, join="gate", block_size=4)
        >>> layer(torch.randn(2, 10, 32))[0].shape
        torch.Size([2, 10, 32])
    """

    core_class = LLNDiagCore


class LLNKeysAttention(ProjectedAttention):
    """Multi-head attention with exact keys and LLN slots, with projections.

    Arguments are those of `LLNAttention` and `LLNKeysCore`: ``keys``, ``block_size``, ``offset``,
    ``learn_offset`` and the rest; ``dropout`` must be 0.

    Example:
        >>> layer = LLNKeysAttention(32, 4, batch_first=True, keys=2, block_size=4)
        >>> layer(torch.randn(2, 10, 32))[0].shape
        torch.Size([2, 10, 32])
    """

    core_class = LLNKeysCore


class WindowAttention(ProjectedAttention):
    """Multi-head softmax attention inside a sliding window, with projections.

    Arguments are those of `LLNAttention` and `WindowCore`: ``window``, ``scale`` and the rest, but
    for α and β.

    Example:
        >>> layer = WindowAttention(32, 4, batch_first=True, window=8)
        >>> layer(torch.randn(2, 10, 32))[0].shape
        torch.Size([2, 10, 32])
    """

    core_class = WindowCore


class PageAttention(ProjectedAttention):
    """Multi-head softmax attention to a window, sinks and chosen pages, with projections.

    Arguments are those of `LLNAttention` and `PageCore`: ``window``, ``sinks``, ``pages``,
    ``page_size`` and the rest, but for α and β.

    Example:
        >>> layer = PageAttention(32, 4, batch_first=True, window=8, pages=2)
        >>> layer(torch.randn(2, 10, 32))[0].shape
        torch.Size([2, 10, 32])
    """

    core_class = PageCore


def _key_mask_of_padding(key_padding_mask: Tensor, key: Tensor) -> Tensor:
    """Turn nn.MultiheadAttention's mask (True or −inf = ignore) into ours (True = attend)."""
    if key_padding_mask.shape != key.shape[:2]:
        raise InvalidInputError(
            f"key_padding_mask must be [B, S] = {list(key.shape[:2])}, got "
            f"{checks.shape_of(key_padding_mask)}."
        )
    if key_padding_mask.device != key.device:
        raise checks.wrong_device("key_padding_mask", key_padding_mask, key.device, "key")
    if key_padding_mask.dtype == torch.bool:
        return ~key_padding_mask
    if not key_padding_mask.dtype.is_floating_point:
        raise InvalidInputError(
            f"key_padding_mask must be bool (True = ignore) or floating point (−inf = ignore), "
            f"got {key_padding_mask.dtype}."
        )
    attend = key_padding_mask == 0
    if values_are_readable(key_padding_mask):
        ignored = key_padding_mask <= torch.finfo(key_padding_mask.dtype).min
        if not bool((attend | ignored).all()):
            raise InvalidInputError(
                "a floating-point key_padding_mask may hold only 0 and −inf: a key can be ignored, "
                "but no bias can be added to its score."
            )
    return attend
