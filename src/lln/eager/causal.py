"""Causal LLN attention: a scan of chunk summaries, fast and exact.

A chunk's rows read the merged summary of all earlier chunks (`lln.eager.summary`) and, inside their
own chunk, the keys up to themselves. There are two ways to compute the inside.

*Fast*: one lower-triangular product, with every feature shifted by its largest exponent so far.
A later key of the same chunk may set that shift; if it exceeds the earlier keys by more than the
exponent range, their rows lose all their digits. The normaliser shows this: at or above ``GUARD``
the result is exact to rounding.

*Exact*: recursive halving. The second half of a chunk reads the summary of its first half, and so
on down to blocks of 8 tokens whose scores are formed one by one in the log domain. It is always
right but several times slower, so it runs only for chunks with a normaliser below ``GUARD``, and
for all chunks where control flow may not depend on values (``torch.compile``, ``torch.export``,
``torch.func``, CUDA graphs).

On a CPU `lln.eager.causal_walk` computes the fast form chunk by chunk, and its gradients.

Dimension legend: n chunks, c tokens in a chunk, D head width, E value width, ``...`` leading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.eager.causal_walk import Inputs, WalkedAttention, walk
from lln.eager.products import multiply
from lln.eager.scan import earlier_merge, running_merge, shift, whole_parts
from lln.eager.summary import LOG_ZERO, key_exponents, merge, summarise
from lln.tracing import has_values, is_compiling

CHUNK = 64
LEAF = 8

# Terms lost to underflow are at most (smallest normal number) / GUARD of their row's sum.
GUARD = {torch.float32: 1e-25, torch.float64: 1e-280}

# A summary that is not asked for before it is needed.
Before = Callable[[], tuple[Tensor, Tensor]]


class Chunks(NamedTuple):
    """Everything the inside of a chunk needs; each chunk is one entry of the batch.

    Attributes:
        query: α·q, ``[..., c, D]``.
        key: β·k, ``[..., c, D]``; ``LOG_ZERO`` at masked tokens.
        value: ``[..., c, E]``; zero at masked tokens.
        log_mass: ``[..., D]``, the summary of all earlier chunks.
        centroid: ``[..., D, E]``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_mass: Tensor
    centroid: Tensor


def causal_attention(
    inputs: Inputs, before: Before | None = None, *, walks: bool = False
) -> Tensor:
    """Eq. (8) with every row's sum running over the keys up to itself: ``[B, H, T, E]``.

    Args:
        inputs: Queries, keys and values, temperatures and mask.
        before: Gives the summary of earlier tokens, which every row sees: log-mass ``[B, H, D]``
            and centroid ``[B, H, D, E]``. Called late, because it may wait for other processes.
        walks: Whether to go from chunk to chunk, which takes ordinary tensors on a CPU that nobody
            traces, and no ``before``.
    """
    if walks:
        walked = walk(inputs, GUARD[inputs.query.dtype])
        if walked is not None:
            return WalkedAttention.apply(*inputs, walked, _scanned)
    return _scanned(inputs, before)


def _scanned(inputs: Inputs, before: Before | None = None) -> Tensor:
    """`causal_attention` by the scan; PyTorch knows its gradients, and theirs."""
    query, key, value, alpha, beta, key_mask = inputs
    tokens = query.shape[-2]
    chunks = whole_parts(tokens, CHUNK)
    padding = chunks * CHUNK - tokens
    token_mask = None
    if key_mask is not None or is_compiling() or padding:
        if key_mask is None:
            key_mask = torch.ones(1, tokens, dtype=torch.bool, device=query.device)
        token_mask = F.pad(key_mask, (0, padding)).unflatten(-1, (chunks, CHUNK)).unsqueeze(1)
    query, key, value = (
        F.pad(tensor, (0, 0, 0, padding)).unflatten(-2, (chunks, CHUNK))
        for tensor in (query, key, value)
    )
    alpha, beta = (
        scale.unsqueeze(-1) if isinstance(scale, Tensor) else scale for scale in (alpha, beta)
    )
    key, value = key_exponents(key, value, beta, token_mask)
    out = attend_chunks(query * alpha, key, value, before=before)
    return out.flatten(-3, -2)[..., :tokens, :]


def attend_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment: Tensor | None = None,
    before: Before | None = None,
) -> Tensor:
    """Causal attention over a row of chunks: ``[..., n, c, E]``.

    Args:
        query: α·q, ``[..., n, c, D]``.
        key: β·k, ``[..., n, c, D]``; ``LOG_ZERO`` at masked tokens.
        value: ``[..., n, c, E]``; zero at masked tokens.
        segment: int ``[n]``, the sequence of every chunk; None = one sequence.
        before: Gives log-mass ``[..., D]`` and centroid ``[..., D, E]`` of tokens before the first
            chunk, for one sequence.
    """
    summaries = summarise(key, value)
    if before is not None:
        log_mass, centroid = earlier_merge(*summaries, before())
    else:
        log_mass, centroid = shift(*running_merge(*summaries, segment))
    if segment is not None:
        continues = segment == F.pad(segment[:-1], (1, 0), value=-1)
        log_mass = torch.where(continues.unsqueeze(-1), log_mass, LOG_ZERO)
        centroid = torch.where(continues[:, None, None], centroid, 0.0)
    chunks = Chunks(query, key, value, log_mass, centroid)
    if not _may_branch_on_values(query):
        return _exact(chunks)
    out, normaliser = _fast(chunks)
    refused = normaliser.detach().amin(-1) < GUARD[query.dtype]
    if not bool(refused.any()):
        return out
    return _split(chunks, refused)


def _fast(chunks: Chunks) -> tuple[Tensor, Tensor]:
    """One triangular product per chunk; returns the output and every row's normaliser."""
    query, key, value, log_mass, centroid = chunks
    log_mass = log_mass.unsqueeze(-2)
    peak = torch.maximum(key.detach().amax(-2, keepdim=True), log_mass.detach())
    query = query + peak
    query = (query - query.detach().amax(-1, keepdim=True)).exp()
    score = multiply(query, (key - peak).exp().mT).tril()
    slot = query * (log_mass - peak).exp()
    normaliser = score.sum(-1) + slot.sum(-1)
    # A row that sees no key at all: everything above is exactly 0, and so must be its output.
    blind = _sees_nothing(key, log_mass)
    normaliser = torch.where(blind, 1.0, normaliser)
    out = multiply(score, value) + multiply(slot, centroid)
    return out / normaliser.unsqueeze(-1), normaliser


def _sees_nothing(key: Tensor, log_mass: Tensor) -> Tensor:
    """Rows ``[..., c]`` before the first valid key of their sequence."""
    masked = key.detach()[..., 0] <= LOG_ZERO / 2
    before = (log_mass.detach()[..., 0] <= LOG_ZERO / 2).expand(masked.shape)
    return before & (masked.to(torch.int32).cumprod(-1) > 0)


def _exact(chunks: Chunks) -> Tensor:
    """Recursive halving; parts are merged by their log-masses."""
    query, key, value, log_mass, centroid = chunks
    logits = query + log_mass.unsqueeze(-2)
    mass, out = logits.logsumexp(-1), logits.softmax(-1) @ centroid
    half = query.shape[-2] // 2
    while half >= LEAF:
        early_key, early_value = (
            tensor.unflatten(-2, (-1, 2, half))[..., 0, :, :] for tensor in (key, value)
        )
        late_query = query.unflatten(-2, (-1, 2, half))[..., 1, :, :]
        early_mass, early_centroid = summarise(early_key, early_value)
        logits = late_query + early_mass.unsqueeze(-2)
        mass, out = _add_part(
            mass, out, logits.logsumexp(-1), logits.softmax(-1) @ early_centroid, half
        )
        half //= 2
    leaf_query, leaf_key, leaf_value = (
        tensor.unflatten(-2, (-1, LEAF)) for tensor in (query, key, value)
    )
    score = (leaf_query.unsqueeze(-2) + leaf_key.unsqueeze(-3)).logsumexp(-1)
    later = torch.ones(LEAF, LEAF, dtype=torch.bool, device=score.device).triu(1)
    score = score.masked_fill(later, 10 * LOG_ZERO)
    leaf_mass = score.logsumexp(-1).flatten(-2)
    leaf_out = (score.softmax(-1) @ leaf_value).flatten(-3, -2)
    return merge(mass, out, leaf_mass, leaf_out)[1]


def _add_part(
    mass: Tensor, out: Tensor, part_mass: Tensor, part_out: Tensor, half: int
) -> tuple[Tensor, Tensor]:
    """Merge a part that exists only for the second halves into the rows of both halves."""
    mass, out = mass.unflatten(-1, (-1, 2, half)), out.unflatten(-2, (-1, 2, half))
    late_mass, late_out = merge(mass[..., 1, :], out[..., 1, :, :], part_mass, part_out)
    mass = torch.stack([mass[..., 0, :], late_mass], dim=-2).flatten(-3)
    out = torch.stack([out[..., 0, :, :], late_out], dim=-3).flatten(-4, -2)
    return mass, out


def _split(chunks: Chunks, refused: Tensor) -> Tensor:
    """The fast form where it is accurate, the exact form for the ``refused`` chunks.

    Both start again from the inputs: a fast result that lost its digits must not be in the
    gradient's graph, not even with weight zero.
    """
    lead = refused.shape
    rows = Chunks(
        *(
            tensor.expand(*lead, *tensor.shape[-kept:]).flatten(0, len(lead) - 1)
            for tensor, kept in zip(chunks, (2, 2, 2, 1, 2), strict=True)
        )
    )
    refused = refused.flatten()
    held, lost = (~refused).nonzero().squeeze(-1), refused.nonzero().squeeze(-1)
    out = torch.cat(
        [
            _fast(Chunks(*(tensor[held] for tensor in rows)))[0],
            _exact(Chunks(*(tensor[lost] for tensor in rows))),
        ]
    )
    return out[torch.cat([held, lost]).argsort()].unflatten(0, lead)


def _may_branch_on_values(tensor: Tensor) -> bool:
    if not has_values(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
