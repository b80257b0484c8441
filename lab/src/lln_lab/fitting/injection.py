"""Measures softmax attention and LLN attention on Gaussian inputs.

Both attentions get the same unit Gaussians (paper, appendix A.7): softmax attention with
scores √p·q·k/√d for many p, LLN attention with αq = s·q and βk = s·k for many s. The curves hold
three statistics of the attention matrix P:

- ``variance``: mean over rows of the variance of log P inside a row,
- ``total``: variance of log P over the whole matrix, the statistic of Eq. (34),
- ``entropy``: mean row entropy in bits, Eq. (7).

Shapes: G independent draws, R query rows, N keys, D features.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

STATISTICS = ("variance", "total", "entropy")

# Attention (softmax or lln) → statistic → values along the grid.
Curves = dict[str, dict[str, list[float]]]

# Entries of one tile of P, all draws together: 8 MiB in float64, small enough for a CPU's caches.
_TILE = 1 << 20


@dataclass(frozen=True)
class Injection:
    """The complete request of one measurement: equal requests give equal results on every device.

    Attributes:
        d: Head width.
        n: Number of keys.
        seed: Seed of the Gaussians.
        p: Variances of the softmax scores to measure softmax attention at.
        s: Scales to measure LLN attention at.
        rows: Most query rows per draw; a sequence of n tokens has at most n.
        keys: Short sequences are drawn ``keys // n`` times, so that they are measured as accurately
            as long ones.
    """

    d: int
    n: int
    seed: int
    p: tuple[float, ...]
    s: tuple[float, ...]
    rows: int = 128
    keys: int = 8192

    @property
    def draws(self) -> int:
        """Number of independent sequences, at least one."""
        return max(1, self.keys // self.n)

    def digest(self) -> str:
        """Name of the request: a hash of everything that decides its result."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def measure(request: Injection, device: str | torch.device = "cpu") -> Curves:
    """Measures both attentions on the request's Gaussians.

    Args:
        request: What to measure.
        device: Where to compute; needs float64.

    Returns:
        ``{"softmax": {statistic: values at p}, "lln": {statistic: values at s}}``, plain lists.
    """
    rows = min(request.rows, request.n)
    q, k = gaussians(request.d, request.n, request.seed, rows, request.draws, device)
    return {
        "softmax": softmax_curves(q, k, request.p),
        "lln": lln_curves(q, k, request.s),
    }


def gaussians(
    d: int, n: int, seed: int, rows: int, draws: int = 1, device: str | torch.device = "cpu"
) -> tuple[Tensor, Tensor]:
    """Draws queries ``[G, R, D]`` and keys ``[G, N, D]`` of unit measured scale, in float64.

    The scale is the one the library divides by: mean(q^2) and the mean over features of Var_j(k).
    Fixing it in each draw removes most of the sampling noise of p. Queries are independent of the
    keys and of one another, so R of them stand for R rows taken from a longer sequence.
    """
    # Always the CPU's generator, so that a fit can be repeated on another device.
    mixed = hashlib.sha256(f"{seed}:{d}:{n}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(mixed[:6], "big"))
    q = torch.randn(draws, rows, d, generator=generator, dtype=torch.float64).to(device)
    k = torch.randn(draws, n, d, generator=generator, dtype=torch.float64).to(device)
    q = q / q.square().mean((-2, -1), keepdim=True).sqrt()
    k = k / k.var(-2, correction=0, keepdim=True).mean(-1, keepdim=True).sqrt()
    return q, k


def softmax_curves(q: Tensor, k: Tensor, p: tuple[float, ...]) -> dict[str, list[float]]:
    """Statistics of softmax attention with score variance p, for each p."""
    scores = [q @ tile.mT / math.sqrt(q.shape[-1]) for tile in _tiles(q, k)]

    def tiles(value: float) -> Iterator[tuple[Tensor, Tensor]]:
        scale = math.sqrt(value)
        # The shift cancels in P; it only keeps the exponentials at or below one.
        top = scale * torch.stack([tile.amax(-1) for tile in scores]).amax(0).unsqueeze(-1)
        for tile in scores:
            logs = scale * tile - top
            yield logs, logs.exp()

    return _curves(tiles, p)


def lln_curves(q: Tensor, k: Tensor, s: tuple[float, ...]) -> dict[str, list[float]]:
    """Statistics of LLN attention with α = β = s on unit inputs, for each s."""

    def tiles(value: float) -> Iterator[tuple[Tensor, Tensor]]:
        features, top = _lln_queries(q, k, value)
        for tile in _tiles(q, k):
            weights = features @ (value * tile - top).exp_().mT
            yield weights.log(), weights

    return _curves(tiles, s)


def softmax_log_p(q: Tensor, k: Tensor, p: float) -> Tensor:
    """Returns log P of softmax attention, ``[G, R, N]``, all at once: for short inputs."""
    return (math.sqrt(p / q.shape[-1]) * (q @ k.mT)).log_softmax(-1)


def lln_log_p(q: Tensor, k: Tensor, s: float) -> Tensor:
    """Returns log P of LLN attention, ``[G, R, N]``, all at once: for short inputs."""
    features, top = _lln_queries(q, k, s)
    weights = features @ (s * k - top).exp().mT
    return weights.log() - weights.sum(-1, keepdim=True).log()


def _lln_queries(q: Tensor, k: Tensor, s: float) -> tuple[Tensor, Tensor]:
    """Query features with the keys' maxima moved into them, and those maxima.

    With m_f = max_j s k_jf the keys' features are at most one, and each row is scaled so that its
    largest feature is one. A row then sums to at least one, and float64 represents log P accurately
    until s times the spread of q and k (about 10) reaches 700; the grids stop far below that.
    """
    top = s * k.amax(-2, keepdim=True)
    logits = s * q + top
    return (logits - logits.amax(-1, keepdim=True)).exp(), top


def _tiles(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Keys in tiles such that draws x rows x tile stays within the tile budget."""
    return k.split(max(1, _TILE // (q.shape[0] * q.shape[1])), dim=-2)


def _curves(
    tiles: Callable[[float], Iterator[tuple[Tensor, Tensor]]], values: tuple[float, ...]
) -> dict[str, list[float]]:
    """Statistics for each value, from tiles of (log w, w) with P = w / rowsum(w)."""
    table = [_statistics(tiles(value)) for value in values]
    if not table:
        return {name: [] for name in STATISTICS}
    return dict(zip(STATISTICS, torch.stack(table).T.tolist(), strict=True))


def _statistics(tiles: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    """The three statistics of one attention matrix, from one pass over its tiles."""
    n, parts = 0, []
    for logs, weights in tiles:
        n += logs.shape[-1]
        squares = torch.linalg.vecdot(logs, logs)
        mixed = torch.linalg.vecdot(weights, logs)
        parts.append(torch.stack([weights.sum(-1), logs.sum(-1), squares, mixed]))
    mass, first, second, mixed = torch.stack(parts).sum(0)
    mean = first / n
    within = (second / n - mean.square()).mean(-1)
    log_mass = mass.log()
    between = (mean - log_mass).var(-1, correction=0)
    entropy = (log_mass - mixed / mass).mean(-1) / math.log(2)
    return torch.stack([within, within + between, entropy]).mean(-1)
