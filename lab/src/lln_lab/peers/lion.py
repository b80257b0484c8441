"""LION-D and LION-S: full linear attention whose weights fade with the distance.

Both triangles of the fading mask are products of decays, so that two running sums over chunks of
tokens, one from each end, replace the N×N mask.

Dimension legend: B batch, H heads, N tokens, D head width, M features, E value width, G chunks,
C tokens of a chunk.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lln.checks.names import check_choice
from lln.precision import accumulation_dtype, without_autocast
from lln_lab.peers.peer import Card, Host, Mask, WideCore, real_tokens, zero_padding
from lln_lab.peers.projected import Branched
from lln_lab.peers.token_blocks import cut

# Tokens whose part of the mask is formed at once.
CHUNK = 64

# Denominators below this are raised to it.
_FLOOR = 1e-6


class LionD(WideCore):
    """LION-D: P_ij ∝ φ(q_i)·φ(k_j) a^|i−j|, a = sigmoid(w) learned per head.

    φ(x) = (silu(x) + ½)/‖silu(x) + ½‖, which is positive. The mask is symmetric and 1 on the
    diagonal. |i − j| counts real tokens, so that padding anywhere is as if it were not there.

    Args:
        features: ``"silu"``, or ``"elu"`` for φ(x) = elu(x) + 1: with a = 1 the Linear Transformer
            (LION-LIT).
    """

    card = Card(
        name="lion_d",
        title="LION-D",
        citation="Afzal et al. 2025, arXiv 2502.16249",
        equation="P_ij ∝ φ(q_i)·φ(k_j) a^|i−j|, a = sigmoid(w), φ(x) = (silu(x)+½)/‖silu(x)+½‖",
        complexity="O(N d² + N C d)",
        random="w ~ N(0, 1) at construction",
        adds="H (w)",
        departures="by chunks in linear time, where the authors train with the N×N mask; the "
        "denominator is clamped at 1e-6 instead of 1e-6 being added; causal = the lower triangle",
    )

    def __init__(self, host: Host, *, features: Literal["silu", "elu"] = "silu") -> None:
        super().__init__(host)
        check_choice("features", features, ("silu", "elu"))
        self.features = features
        self.decay = nn.Parameter(torch.randn(host.num_heads))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask) -> Tensor:
        log_decay = F.logsigmoid(self.decay.to(query.dtype))[:, None].expand(query.shape[:3])
        return fading_attention(self, query, key, value, log_decay, key_mask)

    def matrix(self, query: Tensor, key: Tensor, key_mask: Mask = None) -> Tensor:
        wide = accumulation_dtype(query.dtype)
        position = real_tokens(query, key_mask).to(wide).cumsum(-1)
        distance = (position[:, None, :, None] - position[:, None, None, :]).abs()
        mask = self.decay.to(wide).sigmoid()[:, None, None] ** distance
        return _dense(self, query, key, mask, key_mask)


class LionS(Branched):
    """LION-S: P_ij ∝ φ(q_i)·φ(k_j) M_ij with decays a_i = 1 − sigmoid(w·x_i + b) per head.

        M_ij = a_j a_{j+1} … a_{i−1} for j < i, 1 for j = i, a_{i+1} … a_j for j > i

    This is the authors' mask. From both sides the key's own decay counts and the query's does not,
    so M_ij / M_ji = a_j / a_i for j < i: M is symmetric only where all decays are equal, as in
    `LionD`. Reversing the sequence reverses the outputs. Written as two recurrences, one from each
    end, both reach token i and each counts it half, so that the diagonal of M is 1.

    The decays come from the tokens and not from q and k, so it is a mixer. φ as in `LionD`; padding
    does not decay. The branches are those of `Branched`, as for every core.

    Args:
        features: ``"silu"``, or ``"elu"`` for φ(x) = elu(x) + 1.
    """

    card = Card(
        name="lion_s",
        title="LION-S",
        kind="mixer",
        citation="Afzal et al. 2025, arXiv 2502.16249",
        equation="P_ij ∝ φ(q_i)·φ(k_j) M_ij, M_ij = a_j … a_{i−1} below the diagonal, 1 on it, "
        "a_{i+1} … a_j above, a_i = 1 − sigmoid(w·x_i + b)",
        complexity="O(N d² + N C d)",
        adds="projections and (W + 1) H of the decays, W the width of the tokens",
        departures="as lion_d; no token is exempt from decay, where the authors' vision code "
        "exempts the class token",
    )

    def __init__(
        self, host: Host, *, features: Literal["silu", "elu"] = "silu", **branches: int
    ) -> None:
        super().__init__(host, **branches)
        check_choice("features", features, ("silu", "elu"))
        self.features = features
        self.decay = nn.Linear(host.embed_dim, host.num_heads)

    def attend(
        self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask
    ) -> Tensor:
        log_decay = self._log_decay(x)
        with without_autocast(x):
            return fading_attention(self, query, key, value, log_decay, key_mask)

    def weights(self, x: Tensor, query: Tensor, key: Tensor, key_mask: Mask) -> Tensor:
        log_decay = self._log_decay(x)
        if key_mask is not None:
            log_decay = torch.where(key_mask[:, None], log_decay, 0.0)
        up_to = log_decay.cumsum(-1)
        before = up_to - log_decay
        below = (before[..., :, None] - before[..., None, :]).tril(-1)
        above = (up_to[..., None, :] - up_to[..., :, None]).triu(1)
        return _dense(self, query, key, (below + above).exp(), key_mask)

    def _log_decay(self, x: Tensor) -> Tensor:
        # log(1 − sigmoid(y)) = logsigmoid(−y), without the cancellation.
        logits = self.decay(x).to(accumulation_dtype(x.dtype))
        return F.logsigmoid(-logits).transpose(1, 2)


def fading_attention(
    system: LionD | LionS,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    key_mask: Mask,
) -> Tensor:
    """The row-normalised attention of both systems, ``[B, H, N, E]``.

    ``log_decay`` is log a ``[B, H, N]``, at most 0, in the accumulation dtype.
    """
    wide = log_decay.dtype
    features_q = _map(query.to(wide), system.features)
    features_k = zero_padding(_map(key.to(wide), system.features), key_mask)
    if key_mask is not None:
        log_decay = torch.where(key_mask[:, None], log_decay, 0.0)
    values = F.pad(value.to(wide), (0, 1), value=1.0)
    out = fading_sums(features_q, features_k, values, log_decay, system.host.is_causal)
    return (out[..., :-1] / out[..., -1:].clamp_min(_FLOOR)).to(value.dtype)


def fading_sums(
    features_q: Tensor, features_k: Tensor, values: Tensor, log_decay: Tensor, is_causal: bool
) -> Tensor:
    """Σ_j φ(q_i)·φ(k_j) M_ij v_j with the M of `LionS`, ``[B, H, N, E]``, in linear time."""
    chunks_q, chunks_k, chunks_v = (cut(side, CHUNK) for side in (features_q, features_k, values))
    decay = cut(log_decay, CHUNK, dim=-1)
    up_to = decay.cumsum(-1)
    before, total = up_to - decay, up_to[..., -1:]
    gap = before[..., :, None] - before[..., None, :]
    if is_causal:
        # Above the diagonal the gap is negative and exp might overflow before it is cut off.
        gap = gap.tril()
    else:
        lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=decay.device).tril()
        gap = torch.where(lower, gap, up_to[..., None, :] - up_to[..., :, None])
    weights = chunks_q @ chunks_k.mT * gap.exp()
    own = (weights.tril() if is_causal else weights) @ chunks_v

    # What each chunk leaves behind at its end, and what has come in at its start.
    left = (chunks_k * (total - before).exp().unsqueeze(-1)).mT @ chunks_v
    come = F.pad(running_sums(left, total)[..., :-1, :, :], (0, 0, 0, 0, 1, 0))
    out = own + (chunks_q * before.exp().unsqueeze(-1)) @ come
    if not is_causal:
        # The same from the other end.
        left = (chunks_k * up_to.exp().unsqueeze(-1)).mT @ chunks_v
        come = running_sums(left.flip(-3), total.flip(-2)).flip(-3)
        come = F.pad(come[..., 1:, :, :], (0, 0, 0, 0, 0, 1))
        out = out + (chunks_q * (total - up_to).exp().unsqueeze(-1)) @ come
    return out.flatten(-3, -2)[..., : values.shape[-2], :]


def running_sums(states: Tensor, log_decay: Tensor) -> Tensor:
    """R_g = e^{L_g} R_{g−1} + S_g for all g, by halves: pairs of g are one step of the same sum.

    Time and memory are linear: G + G/2 + G/4 + ….

    Args:
        states: S ``[B, H, G, M, E]``.
        log_decay: L ``[B, H, G, 1]``.
    """
    count = states.shape[-3]
    if count == 1:
        return states
    odd = count % 2
    first, second = F.pad(states, (0, 0, 0, 0, 0, odd)).unflatten(-3, (-1, 2)).unbind(-3)
    first_log, second_log = F.pad(log_decay, (0, 0, 0, odd)).unflatten(-2, (-1, 2)).unbind(-2)
    pairs = second + second_log.exp().unsqueeze(-1) * first
    ends = running_sums(pairs, first_log + second_log)
    before = F.pad(ends[..., :-1, :, :], (0, 0, 0, 0, 1, 0))
    middles = first + first_log.exp().unsqueeze(-1) * before
    return torch.stack((middles, ends), dim=-3).flatten(-4, -3)[..., :count, :, :]


def _dense(
    system: LionD | LionS, query: Tensor, key: Tensor, mask: Tensor, key_mask: Mask
) -> Tensor:
    """P ``[B, H, N, N]`` of a fading mask that broadcasts to it."""
    features_q, features_k = (_map(side.to(mask.dtype), system.features) for side in (query, key))
    weights = features_q @ zero_padding(features_k, key_mask).mT * mask
    if system.host.is_causal:
        weights = weights.tril()
    return weights / weights.sum(-1, keepdim=True).clamp_min(_FLOOR)


def _map(x: Tensor, features: str) -> Tensor:
    if features == "elu":
        return F.elu(x) + 1
    positive = F.silu(x) + 0.5
    return positive / torch.linalg.vector_norm(positive, dim=-1, keepdim=True)
