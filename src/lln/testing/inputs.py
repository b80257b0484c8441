"""Inputs for tests: any shape, dtype and memory layout, reproducible."""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUTS = (
    "contiguous",
    "transposed",
    "packed_qkv",
    "expanded",
    "strided_width",
    "offset",
)


def make_qkv(
    batch: int = 2,
    heads: int = 3,
    tokens: int = 17,
    width: int = 16,
    *,
    keys: int | None = None,
    key_heads: int | None = None,
    value_width: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    scale: float = 1.0,
    layout: str = "contiguous",
    requires_grad: bool = False,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gaussian query, key and value ``[B, H, T, D]`` in the given memory layout.

    Args:
        batch: B.
        heads: H.
        tokens: T.
        width: D.
        keys: S; None = T.
        key_heads: Hk; None = H.
        value_width: E; None = D.
        dtype: Of all three.
        device: Of all three.
        scale: Standard deviation of query and key.
        layout: One of `LAYOUTS`: ``transposed`` is a view of ``[B, T, H, D]`` (what Hugging Face
            hands in), ``packed_qkv`` a slice of one wide tensor, ``expanded`` has stride 0 over the
            batch, ``strided_width`` has stride 2 over the width, ``offset`` starts at an odd
            address.
        requires_grad: Whether the returned tensors are leaves with gradients (layout is kept).
        seed: Of the generator.
    """
    generator = torch.Generator().manual_seed(seed)
    key_heads = heads if key_heads is None else key_heads
    keys = tokens if keys is None else keys
    value_width = width if value_width is None else value_width
    shapes = (
        (batch, heads, tokens, width, scale),
        (batch, key_heads, keys, width, scale),
        (batch, key_heads, keys, value_width, 1.0),
    )
    tensors = []
    for *shape, size in shapes:
        dense = size * torch.randn(*shape, generator=generator, dtype=torch.float64)
        tensor = lay_out(dense.to(dtype=dtype, device=device), layout)
        tensors.append(tensor.requires_grad_(requires_grad))
    return tensors[0], tensors[1], tensors[2]


def lay_out(dense: Tensor, layout: str) -> Tensor:
    """The same values (``expanded``: of the first sample, repeated) with other strides."""
    batch, heads, tokens, width = dense.shape
    if layout == "contiguous":
        return dense.contiguous()
    if layout == "transposed":
        return dense.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "packed_qkv":
        wide = dense.new_zeros(batch, tokens, heads, 3 * width)
        wide[..., width : 2 * width] = dense.transpose(1, 2)
        return wide[..., width : 2 * width].transpose(1, 2)
    if layout == "expanded":
        return dense[:1].contiguous().expand(batch, -1, -1, -1)
    if layout == "strided_width":
        wide = dense.new_zeros(batch, heads, tokens, 2 * width)
        wide[..., ::2] = dense
        return wide[..., ::2]
    if layout == "offset":
        flat = dense.new_zeros(dense.numel() + 1)
        flat[1:] = dense.flatten()
        return flat[1:].view(dense.shape)
    raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}.")
