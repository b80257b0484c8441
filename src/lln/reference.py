"""Every equation of the paper as written: N×N, float64, short, slow and obvious.

This module defines what is right. It uses neither the two-softmax identity nor any other part of
this package, so that agreement with it means something. Kernels are kept as logarithms, since
e^{αq}·e^{βk} leaves even float64 for ordinary outliers.

Dimension legend: ``...`` leading dimensions (batch, heads), T queries, S keys, D head width,
E value width. ``keep`` arguments are bool, broadcast to ``[..., T, S]``, True = attend.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Appendix A.7 as released by the authors: σ²_lln = a·σ̃² + b, Eq. (34).
PAPER_A = 0.14855178144710912
PAPER_B = -0.35487039130661086

_ROWS = 64


def log_softmax_kernel(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    """Eq. (2): log κ_exp(q_i, k_j) = q_i·k_j / √d, ``[..., T, S]``."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return scale * (query.double() @ key.double().mT)


def log_lln_kernel(
    query: Tensor, key: Tensor, alpha: float | Tensor, beta: float | Tensor
) -> Tensor:
    """Numerator of Eq. (9), log⟨e^{αq_i}, e^{βk_j}⟩ = log Σ_f e^{αq_if + βk_jf}: ``[T, S]``."""
    exponent_q, exponent_k = alpha * query.double(), beta * key.double()
    if query.shape[-2] == 0:
        return exponent_q @ exponent_k.mT
    blocks = [
        (rows.unsqueeze(-2) + exponent_k.unsqueeze(-3)).logsumexp(-1)
        for rows in exponent_q.split(_ROWS, dim=-2)
    ]
    return torch.cat(blocks, dim=-2)


def normalise(log_kernel: Tensor, keep: Tensor | None = None) -> Tensor:
    """Divide every row of a kernel by its sum over the kept keys; rows without kept keys are 0."""
    if keep is None:
        return log_kernel.softmax(-1)
    weights = torch.where(keep, log_kernel, -1e300).softmax(-1)
    return torch.where(keep, weights, 0.0)


def kernel_attention(log_kernel: Tensor, value: Tensor, keep: Tensor | None = None) -> Tensor:
    """Eq. (1): out_i = Σ_j κ(q_i, k_j) v_j / Σ_l κ(q_i, k_l), ``[..., T, E]``."""
    return normalise(log_kernel, keep) @ _hide(value, keep)


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    keep: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Eq. (1) with the kernel of Eq. (2)."""
    return kernel_attention(log_softmax_kernel(query, _hide(key, keep), scale), value, keep)


def softmax_matrix(
    query: Tensor, key: Tensor, *, keep: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Eq. (6): P^(SM), ``[..., T, S]``."""
    return normalise(log_softmax_kernel(query, _hide(key, keep), scale), keep)


def entropy(matrix: Tensor) -> Tensor:
    """Eq. (7): H(P) = −(1/N) Σ_ij P_ij log₂ P_ij, ``[...]``."""
    return torch.special.entr(matrix.double()).sum(-1).mean(-1) / math.log(2)


def lln_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    *,
    keep: Tensor | None = None,
) -> Tensor:
    """Eq. (8): LLN attention, ``[..., T, E]``."""
    return lln_matrix(query, key, alpha, beta, keep=keep) @ _hide(value, keep)


def lln_matrix(
    query: Tensor,
    key: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    *,
    keep: Tensor | None = None,
) -> Tensor:
    """Eq. (9): P^(LLN), ``[..., T, S]``."""
    return normalise(log_lln_kernel(query, _hide(key, keep), alpha, beta), keep)


def matched_temperatures(
    query_std: float, key_std: float, *, a: float = PAPER_A, b: float = PAPER_B
) -> tuple[float, float]:
    """Eq. (10): α = σ̃/(√2 σq), β = σ̃/(√2 σk), σ̃² = (σq²σk² − b)/a."""
    spread = math.sqrt((query_std**2 * key_std**2 - b) / a)
    return spread / (math.sqrt(2) * query_std), spread / (math.sqrt(2) * key_std)


def spectral_gap(matrix: Tensor) -> Tensor:
    """Section 3.2.2: γ = 1 − |λ₂| of a square row-stochastic matrix, ``[...]``."""
    magnitudes = torch.linalg.eigvals(matrix.double()).abs().sort(-1, descending=True).values
    if magnitudes.shape[-1] < 2:
        return torch.ones_like(magnitudes[..., 0])
    return 1 - magnitudes[..., 1]


def block_keep(
    tokens: int,
    block_size: int,
    device: torch.device | None = None,
    *,
    keep: Tensor | None = None,
) -> Tensor:
    """Which pairs lie in one diagonal block (section 4.2): bool ``[..., T, T]``.

    Blocks are counted from the first token that ``keep`` lets any query see.
    """
    place = torch.arange(tokens, device=device)
    if keep is not None and tokens > 0:
        place = place - keep.any(-2).int().argmax(-1, keepdim=True)
    block = place.div(block_size, rounding_mode="floor")
    return block.unsqueeze(-1) == block.unsqueeze(-2)


def causal_keep(tokens: int, device: torch.device | None = None) -> Tensor:
    """Which pairs causal attention keeps, j ≤ i: bool ``[T, T]``."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()


def block_diagonal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_size: int,
    *,
    keep: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention whose matrix is zero outside the diagonal blocks (section 4.2)."""
    blocks = block_keep(query.shape[-2], block_size, query.device, keep=keep)
    seen = blocks if keep is None else keep & blocks
    # Hide only what the caller masked: a NaN in another block must stay visible there.
    key, value = _hide(key, keep), _hide(value, keep)
    return normalise(log_softmax_kernel(query, key, scale), seen) @ value


def window_keep(
    tokens: int, window: int, device: torch.device | None = None, *, is_causal: bool = False
) -> Tensor:
    """Which pairs lie within a window, |i - j| ≤ window: bool ``[T, T]``."""
    place = torch.arange(tokens, device=device)
    distance = place.unsqueeze(-1) - place
    return (distance <= window) & (distance >= (0 if is_causal else -window))


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    *,
    keep: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Softmax attention whose matrix is zero outside a band around the diagonal."""
    near = window_keep(query.shape[-2], window, query.device, is_causal=is_causal)
    seen = near if keep is None else keep & near
    key, value = _hide(key, keep), _hide(value, keep)
    return normalise(log_softmax_kernel(query, key, scale), seen) @ value


def page_pairs(
    pages: Tensor,
    keys: int,
    *,
    window: int,
    sinks: int,
    page_size: int,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Which pairs enter the softmax of `page_attention`: bool ``[B, H, T, S]``.

    Those of a query with its window, with the first tokens, and with the pages that it chose.

    Args:
        pages: int ``[B, H, T, P]``, the numbers of the pages of every query; -1 = none.
        keys: S; queries are the last of the keys' positions.
        window: Tokens to each side of a query's own.
        sinks: How many first tokens every query sees.
        page_size: Tokens in a page; pages and sinks are counted from the first valid token.
        key_mask: bool ``[B, S]``.
        is_causal: Whether a query sees only its own and earlier tokens.
    """
    place = torch.arange(keys, device=pages.device)
    distance = place[keys - pages.shape[2] :, None] - place
    later = place.expand(1, keys)
    if key_mask is not None and keys > 0:
        later = later - key_mask.int().argmax(-1, keepdim=True)
    page = later.div(page_size, rounding_mode="floor")[:, None, None, :, None]
    chosen = (page == pages.unsqueeze(-2)).any(-1) & (later >= 0)[:, None, None]
    first = ((later >= 0) & (later < sinks))[:, None, None]
    pairs = (distance.abs() <= window) | first | chosen
    if is_causal:
        pairs = pairs & (distance >= 0)
    return pairs if key_mask is None else pairs & key_mask[:, None, None]


def lln_diag_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    block_size: int,
    *,
    mix: float | Tensor = 0.5,
    keep: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Figure 3: mix · LLN + (1 − mix) · block-diagonal."""
    long_range = lln_attention(query, key, value, alpha, beta, keep=keep)
    short_range = block_diagonal_attention(query, key, value, block_size, keep=keep, scale=scale)
    return mix * long_range + (1 - mix) * short_range


def exact_pairs(
    indices: Tensor,
    tokens: int,
    block_size: int,
    group_size: int,
    *,
    keep: Tensor | None = None,
) -> Tensor:
    """Which pairs enter the softmax of `lln_keys_attention` one by one: bool ``[B, H, T, T]``.

    Those of one block, and those of a query with its group's chosen keys that it may see.

    Args:
        indices: int ``[B, H, G, K]``: the keys of every group of queries; -1 = none.
        tokens: T.
        block_size: Tokens in a block.
        group_size: Queries in a group, a divisor of the block size.
        keep: As above; blocks are counted from the first token that it lets any query see.
    """
    place = torch.arange(tokens, device=indices.device).expand(indices.shape[0], 1, tokens)
    if keep is not None and tokens > 0:
        first = keep.any(-2).int().argmax(-1, keepdim=True)
        place = place + (-first) % block_size
    block, group = place // block_size, place // group_size
    own = block.unsqueeze(-1) == block.unsqueeze(-2)
    # One column more than there are tokens, where missing keys go.
    chosen = torch.zeros(*indices.shape[:3], tokens + 1, dtype=torch.bool, device=indices.device)
    missing = (indices < 0) | (indices > tokens)
    chosen.scatter_(-1, torch.where(missing, tokens, indices), True)
    rows = group.unsqueeze(-1).expand(-1, indices.shape[1], -1, tokens)
    chosen = chosen[..., :tokens].gather(2, rows)
    pairs = own | chosen
    return pairs if keep is None else pairs & keep


def lln_keys_matrix(
    query: Tensor,
    key: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    exact: Tensor,
    offset: float | Tensor,
    *,
    keep: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Weights of `lln_keys_attention`, ``[..., T, S]``.

    Args:
        query: ``[..., T, D]``.
        key: ``[..., S, D]``.
        alpha: As in `lln_matrix`.
        beta: Likewise.
        exact: bool ``[..., T, S]``, see `exact_pairs`.
        offset: g, added to the logarithm of the LLN kernel.
        keep: bool, which pairs exist at all.
        scale: Factor of the softmax scores; None = 1/√D.
    """
    key = _hide(key, keep)
    everything = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=key.device)
    rest = everything if keep is None else keep
    missing = (rest & ~exact).sum(-1, keepdim=True).double()
    number = rest.sum(-1, keepdim=True).clamp_min(1)
    share = missing / number
    # The mean of the keys that a row's LLN part sums over; α(q - (β/α)μ) + βk = αq + β(k - μ).
    centre = rest.double() @ key / number
    centred = log_lln_kernel(query.double() - beta / alpha * centre, key, alpha, beta)
    level = log_softmax_kernel(query.unsqueeze(-2), centre.unsqueeze(-2), scale).squeeze(-1)
    linear = centred + level + offset + share.clamp_min(1e-300).log()
    linear = torch.where(rest & (share > 0), linear, -1e300)
    scores = torch.where(exact, log_softmax_kernel(query, key, scale), -1e300)
    return normalise(torch.logaddexp(scores, linear), (rest & (share > 0)) | exact)


def lln_keys_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    exact: Tensor,
    offset: float | Tensor,
    *,
    keep: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Softmax over exact pairs and LLN over all, under one normaliser, ``[..., T, E]``.

        out_i = Σ_j w_ij v_j / Σ_l w_il
        w_ij = [j exact] e^{q_i·k_j/√D} + ρ_i e^{g + q_i·μ/√D} ⟨e^{αq_i}, e^{β(k_j - μ)}⟩

    ρ_i is the share of keys that are not exact: with every key exact this is softmax, Eq. (1). μ is
    the mean key: like softmax, this does not change when a vector is added to all keys.
    """
    matrix = lln_keys_matrix(query, key, alpha, beta, exact, offset, keep=keep, scale=scale)
    return matrix @ _hide(value, keep)


def _hide(tensor: Tensor, keep: Tensor | None) -> Tensor:
    """Zero the tokens that no query keeps, so that a NaN in them cannot leak as 0 · NaN."""
    if keep is None:
        return tensor.double()
    seen = keep.any(-2).unsqueeze(-1)
    return torch.where(seen, tensor.double(), 0.0)
