"""Reformer: tokens hashed into buckets, sorted, and attended to in chunks of the sorted list.

Dimension legend: B batch, H heads, N tokens, D head width, R rounds of hashing, c tokens of a
chunk, n chunks of a list, b buckets.
"""

import math

import torch
from torch import Tensor

from lln.precision import accumulation_dtype, without_autocast
from lln_lab.peers.option_checks import check_counts
from lln_lab.peers.peer import Card, Host, Mask, Peer, real_tokens
from lln_lab.peers.projections import join_heads, split_heads, square_maps
from lln_lab.peers.token_blocks import cut, pick

# Scores of a token with itself and with keys it must not see. Finite, in this order: a token
# without any other key looks at itself.
SELF_SCORE = -1e5
HIDDEN_SCORE = -1e9


class Reformer(Peer):
    """LSH attention with shared queries and keys u = W x.

        bucket_r(i) = argmax [u_i R_r; −u_i R_r],  R_r Gaussian, one per head and round
        s_ij = u_i·u_j/‖u_j‖ for the keys j of i's chunk and the chunk before it in round r
        O_i = Σ_r softmax_r(L_ir) Σ_j exp(s_ij − L_ir) v_j,  L_ir = log Σ_j exp s_ij

    The lists of all rounds are sorted by bucket, joined and cut into chunks of c; the first chunk
    looks back at the last. A key met twice in a window counts twice, as in published code. A
    token looks at itself only where it has nothing else.

    The number of buckets follows the real length of each sample, 2^⌊log₂ 2⌊N/c⌋⌋, as a product of
    two hashes where it is large; a sample of at most c real tokens gets plain attention.

    Args:
        host: Its ``max_len`` bounds the number of buckets; longer inputs keep that number.
        rounds: R.
        chunk: c.
    """

    rotations: Tensor
    of_power: Tensor

    card = Card(
        name="reformer",
        title="Reformer (LSH attention)",
        kind="mixer",
        citation="Kitaev et al. 2020, arXiv 2001.04451",
        equation="P_ij ∝ exp(u_i·u_j/‖u_j‖) over j in i's chunk of the list sorted by hash",
        complexity="O(R N c d + R N log N)",
        causal_limit="as published, no later token is attended to, but the hashes of all tokens "
        "decide which earlier ones share a chunk",
        repeats_on_gpu=False,
        random="the rotations of the hash; drawn anew in every training step",
        oracle="transformers LSHSelfAttention, sharing its buckets; dense form",
        adds="one projection for queries and keys, one for values, one for the output; no biases",
        departures="rotations are a buffer, the same in every evaluation (published code draws at "
        "every call); padded tokens go behind the last round instead of behind each, and buckets "
        "follow the real length, so that padding changes nothing; any length",
    )

    def __init__(self, host: Host, *, rounds: int = 2, chunk: int = 64) -> None:
        super().__init__(host)
        check_counts(rounds=rounds, chunk=chunk)
        self.rounds, self.chunk = rounds, chunk
        self.query_key, self.value, self.out = square_maps(host.embed_dim, 3, bias=False)
        self.factors = bucket_factors(host.max_len, chunk)
        self.register_buffer("of_power", torch.tensor(self.factors), persistent=False)
        self.most = math.prod(self.factors[-1])
        self.columns = [max(pair[side] for pair in self.factors) // 2 for side in (0, 1)]
        shape = (host.num_heads, rounds, host.head_dim, sum(self.columns))
        self.register_buffer("rotations", torch.randn(shape))

    def mix(self, x: Tensor, key_mask: Mask) -> Tensor:
        if self.training:
            self.rotations.normal_()
        key_mask, wide = real_tokens(x, key_mask), accumulation_dtype(x.dtype)
        projected = self.query_key(x), self.value(x)
        with without_autocast(x):
            shared, value = (split_heads(side.to(wide), self.host.num_heads) for side in projected)
            lengths = key_mask.sum(-1)
            # A second round of a sequence that fits one chunk would only repeat the first.
            first = torch.arange(self.rounds, device=x.device) == 0
            used = key_mask.unsqueeze(1) & (
                first.unsqueeze(-1) | (lengths > self.chunk)[:, None, None]
            )
            buckets = self.buckets(shared.detach(), lengths)
            buckets = torch.where(used.unsqueeze(1), buckets, self.rounds * self.most)
            last = (used.sum((1, 2)) - 1).clamp_min(0) // self.chunk
            out = attend_sorted(
                shared, value, buckets, used, last, chunk=self.chunk, is_causal=self.host.is_causal
            )
        return self.out(join_heads(out).to(x.dtype))

    def buckets(self, shared: Tensor, lengths: Tensor) -> Tensor:
        """Buckets ``[B, H, R, N]``, numbered on from round to round.

        Args:
            shared: u, ``[B, H, N, D]``.
            lengths: Real tokens of each sample, ``[B]``.
        """
        powers = 2 ** torch.arange(1, len(self.factors), device=shared.device)
        # 2⌊N/c⌋ rounded down to a power of two, as an index into the factors.
        power = torch.bucketize(lengths // self.chunk, powers, right=True)
        of_first, of_second = self.of_power[power].unbind(-1)
        turned = shared.unsqueeze(2) @ self.rotations.to(shared.dtype)
        first, second = turned.split(self.columns, dim=-1)
        found = _side(first, of_first)
        if self.columns[1]:
            found = found + of_first[:, None, None, None] * _side(second, of_second)
        return found + self.most * torch.arange(self.rounds, device=shared.device).unsqueeze(-1)


def bucket_factors(max_len: int, chunk: int) -> list[tuple[int, int]]:
    """For 2, 4, 8, … buckets, up to those of max_len tokens: the factors they are hashed by.

    Many buckets are two hashes of about the root of their number, which keeps rotations small.

    >>> bucket_factors(512, 64)
    [(2, 1), (4, 1), (8, 1), (16, 1)]
    """
    limit = 2 * max(math.isqrt(max_len // chunk), chunk)
    powers = range(1, max(2 * (max_len // chunk), 2).bit_length())
    return [
        (2**power, 1) if 2**power <= limit else (2 ** (power // 2), 2 ** (power - power // 2))
        for power in powers
    ]


def attend_sorted(
    shared: Tensor,
    value: Tensor,
    buckets: Tensor,
    used: Tensor,
    last: Tensor,
    *,
    chunk: int,
    is_causal: bool = False,
) -> Tensor:
    """Attention inside chunks of the list sorted by bucket, rounds joined by their mass.

    Args:
        shared: u, ``[B, H, N, D]``.
        value: Like shared.
        buckets: int64 ``[B, H, R, N]``, different in different rounds.
        used: bool ``[B, R, N]``: which tokens are real, round by round.
        last: int64 ``[B]``: the chunk that the first one looks back at.
        chunk: c.
        is_causal: Whether keys of later positions are hidden.

    Returns:
        ``[B, H, N, D]``.
    """
    rounds, tokens = buckets.shape[-2:]
    order = buckets.flatten(-2).argsort(dim=-1, stable=True)
    is_used = used.flatten(1).unsqueeze(1).expand_as(order).gather(-1, order)
    place, is_used = cut(order % tokens, chunk, dim=-1), cut(is_used, chunk, dim=-1)
    unit = shared * torch.rsqrt(shared.square().mean(-1, keepdim=True) + 1e-6)
    key = unit / math.sqrt(shared.shape[-1])
    queries, keys, values = (
        pick(side, place.flatten(2)).unflatten(2, place.shape[2:]) for side in (shared, key, value)
    )
    keys, values, seen, place_k = (
        _with_previous(side, last) for side in (keys, values, is_used, place)
    )
    seen, place_q, place_k = seen.unsqueeze(-2), place.unsqueeze(-1), place_k.unsqueeze(-2)
    hidden = ~seen | (place_k > place_q) if is_causal else ~seen
    scores = (queries @ keys.mT).masked_fill(hidden, HIDDEN_SCORE)
    scores = scores.masked_fill(seen & (place_q == place_k), SELF_SCORE)
    mass = scores.logsumexp(-1, keepdim=True)
    # Not exp(scores − mass): beside SELF_SCORE float32 has two decimals left.
    out = scores.softmax(-1) @ values
    # Where each entry of the joined lists went, to bring the rows back.
    back = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )
    mass = mass.flatten(2).gather(-1, back).unflatten(-1, (rounds, tokens))
    out = pick(out.flatten(2, 3), back).unflatten(2, (rounds, tokens))
    # Lower than any score: unused rounds have no say where another one is used.
    shares = mass.masked_fill(~used.unsqueeze(1), -1e30).softmax(2)
    return (shares.unsqueeze(-1) * out).sum(2)


def _side(turned: Tensor, counts: Tensor) -> Tensor:
    """The place of the maximum of [t; −t], of which counts/2 columns count: ``[B, H, R, N]``."""
    half = counts[:, None, None, None] // 2
    column = torch.arange(turned.shape[-1], device=turned.device)
    size = turned.abs().masked_fill(column >= half.unsqueeze(-1), -1.0)
    best = size.argmax(-1)
    is_negative = turned.gather(-1, best.unsqueeze(-1)).squeeze(-1) < 0
    # A factor of 1 has no columns: one bucket, number 0.
    return torch.where(half > 0, best + half * is_negative, 0)


def _with_previous(chunks: Tensor, last: Tensor) -> Tensor:
    """``[B, H, n, c, …]`` → ``[B, H, n, 2c, …]``: the chunk before, then the own."""
    index = last.reshape(-1, *(1,) * (chunks.dim() - 1))
    wrapped = torch.take_along_dim(chunks, index, dim=2)
    return torch.cat((torch.cat((wrapped, chunks[:, :, :-1]), dim=2), chunks), dim=3)
