"""Products with Toeplitz matrices whose entries a small network makes, by FFT.

Dimension legend: B batch, N tokens, C channels, each with a Toeplitz matrix of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lln.precision import accumulation_dtype, without_autocast
from lln.tracing import has_values, is_compiling
from lln_lab.peers.gated import srms

if TYPE_CHECKING:
    from typing_extensions import Self


class RelativeNetwork(nn.Module):
    """RPE: a distance in tokens → one number per channel.

    Linear(1, width), `layers` times (SRMS, ReLU, Linear), then SRMS, ReLU, Linear(width, C).
    """

    def __init__(self, channels: int, *, width: int = 64, layers: int = 6) -> None:
        """Args: channels is C, width and layers those of the network."""
        super().__init__()
        self.first = nn.Linear(1, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.last = nn.Linear(width, channels)

    def forward(self, distances: Tensor) -> Tensor:
        """``[R]`` → ``[R, C]`` in the dtype of distances: bfloat16 has no 257."""
        hidden = _linear(self.first, distances[:, None])
        for layer in (*self.hidden, self.last):
            hidden = _linear(layer, srms(hidden).relu())
        return hidden


class Toeplitz(nn.Module):
    """(Tz)_i = Σ_j t_{i−j} z_j in every channel, t_r = γ^|r| RPE(r).

    Where no gradient is asked for, evaluation keeps the spectrum of t for the last length. It is
    made anew when a parameter has changed, except by a write through ``parameter.data``, which
    nothing can see: call ``eval()`` or ``train()`` after one.
    """

    def __init__(
        self, channels: int, *, gamma: float, is_causal: bool, width: int = 64, layers: int = 6
    ) -> None:
        """Args: channels is C, gamma γ; causal: t_r = 0 for r < 0; the rest as in the network."""
        super().__init__()
        self.gamma, self.is_causal = gamma, is_causal
        self.network = RelativeNetwork(channels, width=width, layers=layers)
        # What the spectrum was made of, the weights themselves (alive, so that no other tensor
        # gets their address), and the spectrum.
        self._kept: tuple[tuple[object, ...], list[Tensor], Tensor] | None = None

    def train(self, mode: bool = True) -> Self:
        """As in every module; the kept spectrum goes."""
        self._kept = None
        return super().train(mode)

    def forward(self, z: Tensor) -> Tensor:
        """``[B, N, C]`` → the same in the accumulation dtype."""
        samples, tokens = z.shape[:2]
        with without_autocast(z):
            wide = accumulation_dtype(z.dtype)
            # MKL does not transform an empty batch; a sample of zeros goes through in its place.
            padded = z.to(wide) if samples else F.pad(z.to(wide), (0, 0, 0, 0, 0, 1))
            spectrum = torch.fft.rfft(padded, n=2 * tokens, dim=1)
            spectrum = spectrum * self.spectrum(tokens, wide)
            return torch.fft.irfft(spectrum, n=2 * tokens, dim=1)[:samples, :tokens]

    def spectrum(self, tokens: int, dtype: torch.dtype) -> Tensor:
        """The Fourier transform ``[N + 1, C]`` of t laid out on a circle of 2N places."""
        if not self._may_keep():
            return self._spectrum(tokens, dtype)
        weights = list(self.network.parameters())
        seen = (tokens, dtype, *((w.device, w.data_ptr(), w._version) for w in weights))
        if self._kept is None or self._kept[0] != seen:
            made = self._spectrum(tokens, dtype)
            self._kept = (seen, [weight.detach() for weight in weights], made)
        return self._kept[2]

    def coefficients(self, distances: Tensor) -> Tensor:
        """t_r for distances r ``[R]`` → ``[R, C]``."""
        decay = self.gamma ** distances.abs()
        return decay[:, None] * self.network(distances)

    def _spectrum(self, tokens: int, dtype: torch.dtype) -> Tensor:
        device = self.network.first.weight.device
        forward = torch.arange(tokens, dtype=dtype, device=device)
        if self.is_causal:
            circle = self.coefficients(forward)
        else:
            distances = torch.cat((forward, forward[1:] - tokens))
            after, before = self.coefficients(distances).split((tokens, tokens - 1))
            # No two tokens are N apart: what stands there is never used.
            circle = torch.cat((after, torch.zeros_like(after[:1]), before))
        return torch.fft.rfft(circle, n=2 * tokens, dim=0)

    def _may_keep(self) -> bool:
        if self.training or torch.is_grad_enabled() or is_compiling():
            return False
        return all(has_values(w) and not w.is_inference() for w in self.network.parameters())


def _linear(layer: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(layer, nn.Linear)
    return F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))
