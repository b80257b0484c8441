"""Rotary positions, plain and as TransNormer learns them.

Dimension legend: N tokens, D width that is rotated.
"""

import torch
from torch import Tensor, nn

from lln.errors import InvalidInputError
from lln.precision import accumulation_dtype


def check_even(name: str, width: int) -> None:
    """Refuse a width that cannot be rotated in pairs."""
    if width % 2:
        raise InvalidInputError(f"{name} must be even for rotary positions, got {width}.")


def frequencies(
    width: int,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    theta: float = 10_000.0,
) -> Tensor:
    """θ^(−2i/D), ``[D/2]``; width is D."""
    return theta ** (-torch.arange(0, width, 2, dtype=dtype, device=device) / width)


def rotate(x: Tensor, angles: Tensor, *, halves: bool = False) -> Tensor:
    """Turn the pairs (x₀, x₁), (x₂, x₃), … of position n by n·angles.

    Args:
        x: ``[..., N, D]``.
        angles: ``[D/2]``, radians per position.
        halves: Whether the pairs are (x₀, x_{D/2}), (x₁, x_{D/2+1}), … instead.

    Returns:
        Like x, in its accumulation dtype: half precision cannot tell late angles apart.
    """
    wide = accumulation_dtype(x.dtype)
    places = torch.arange(x.shape[-2], dtype=wide, device=x.device)
    turns = places[:, None] * angles.to(wide)
    cosine, sine = turns.cos(), turns.sin()
    x = x.to(wide)
    first, second = x.chunk(2, dim=-1) if halves else x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = (first * cosine - second * sine, first * sine + second * cosine)
    return torch.cat(turned, dim=-1) if halves else torch.stack(turned, dim=-1).flatten(-2)


class LearnedRotation(nn.Module):
    """LRPE: a fixed random reflection x − 2v(v·x), then rotary positions with learned angles."""

    def __init__(self, width: int) -> None:
        """Draw v and start the angles at 10000^(−2i/D); width is D."""
        super().__init__()
        check_even("the head width", width)
        self.angles = nn.Parameter(frequencies(width))
        self.mirror: Tensor
        self.register_buffer("mirror", nn.functional.normalize(torch.randn(width), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., N, D]`` → the same in the accumulation dtype; positions run from 0."""
        wide = accumulation_dtype(x.dtype)
        # Again a unit vector after a cast of the module to half precision.
        mirror = nn.functional.normalize(self.mirror.to(wide), dim=0)
        x = x.to(wide)
        return rotate(x - 2 * (x @ mirror).unsqueeze(-1) * mirror, self.angles)
