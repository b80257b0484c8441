"""Photos changed at random, on the device they are on: the same class, other pixels.

Dimension legend: B batch, S side.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def changed(photos: Tensor, random: torch.Generator) -> Tensor:
    """Mirrored, padded and cropped, turned, resized, recoloured, and with a square left out.

    Args:
        photos: ``[B, 3, S, S]`` from 0 to 1.
        random: What decides, on the same device.
    """

    def draw(low: float, high: float, *more: int) -> Tensor:
        """``[B, 1, 1, 1]`` or with more axes."""
        given = torch.rand(
            len(photos), *(more or (1, 1, 1)), generator=random, device=photos.device
        )
        return low + (high - low) * given

    turn = draw(-math.pi / 12, math.pi / 12).flatten()
    zoom = draw(0.75, 1.15).flatten()
    mirror = draw(-1, 1).flatten().sign()
    shift = draw(-0.2, 0.2, 2)
    places = torch.stack(
        [
            torch.stack([zoom * mirror * turn.cos(), -zoom * turn.sin(), shift[:, 0]], dim=-1),
            torch.stack([zoom * mirror * turn.sin(), zoom * turn.cos(), shift[:, 1]], dim=-1),
        ],
        dim=1,
    )
    grid = F.affine_grid(places, list(photos.shape), align_corners=False)
    out = F.grid_sample(photos, grid, padding_mode="reflection", align_corners=False)
    # Brightness, contrast, saturation.
    out = out * draw(0.7, 1.3)
    out = out.mean((1, 2, 3), keepdim=True).lerp(out, draw(0.7, 1.3))
    out = out.mean(1, keepdim=True).lerp(out, draw(0.6, 1.4)).clamp(0, 1)
    centre, half = draw(-1, 1, 2), draw(0, 0.35, 1)
    line = torch.linspace(-1, 1, photos.shape[-1], device=photos.device)
    away = (line - centre[..., None]).abs() > half[..., None]
    return torch.where(away[:, 0, None, :, None] | away[:, 1, None, None, :], out, 0.5)


def mixed(photos: Tensor, shares: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Every photo mixed with some of another one, and the shares of the classes likewise (mixup).

    Args:
        photos: ``[B, 3, S, S]``.
        shares: ``[B, C]``.
        random: What decides.
    """
    # Mostly little, at most half.
    share = torch.rand(len(photos), 1, generator=random, device=photos.device) ** 2 / 2
    other = torch.randperm(len(photos), generator=random, device=photos.device)
    lines = share[..., None, None]
    return photos.lerp(photos[other], lines), shares.lerp(shares[other], share)
