"""Spectral gap of P, section 3.2.2: how fast a walk along the attention forgets its start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from lln.errors import InvalidInputError
from lln.instruments.attention_inputs import AttentionInputs
from lln.instruments.eigenvalues import (
    DENSE,
    Product,
    second_moduli,
    second_modulus,
    second_modulus_of_product,
)
from lln.instruments.head_groups import measure
from lln.instruments.instrument import instrument
from lln.instruments.rows import TILE, AttentionRows
from lln.instruments.unmasked_heads import UnmaskedHeads

# Entries of P, or of its diagonal blocks, that may be kept between products: P of 4,096 tokens, 128
# MiB. Made again for each of some 150 products it would cost more than all eigenvalues.
KEPT = 1 << 24


@instrument(AttentionInputs)
def spectral_gap(inputs: AttentionInputs) -> Tensor:
    """Spectral gap γ = 1 − |λ₂| of P (section 3.2.2).

    How it is found depends on P, and always exactly (to rounding, or 1e-8 where iterated):

    - LLN attention: the D×D matrix B·A, which has the eigenvalues of P = A·B; O(N·D²).
    - Causal attention of any kind: the largest diagonal entry after the first row's, because P is
      triangular.
    - Several diagonal blocks: zero, because every block has an eigenvalue 1 of its own.
    - Softmax, windows, LLN + diagonal and exact keys: Arnoldi iteration (scipy) on
      x ↦ P·x − mean(P·x). Beyond N = 4,096 softmax makes P again for every product, some 150 times;
      the others keep what they are made of, O(N·(block + window + keys + D)).

    The gap of ``"lln_diag"`` sits near ``mix`` whatever the inputs, because the scaled-down block
    diagonal has an eigenvalue near 1 − mix for every block; look at the parts instead.

    Returns:
        ``[B, H]``, float64, from 0 to 1; NaN as in `entropy`. A single token has gap 1.
    """
    if not inputs.is_square:
        queries, keys = inputs.query.shape[2], inputs.key.shape[2]
        raise InvalidInputError(
            f"spectral_gap needs as many queries as keys, got T = {queries} and S = "
            f"{keys}: eigenvalues exist for self attention only."
        )
    return measure(inputs, lambda heads: (1 - _second_modulus(heads)).clamp(0.0, 1.0))


def _second_modulus(heads: UnmaskedHeads) -> Tensor:
    """|λ₂| of every head, ``[G]``."""
    if heads.is_causal:
        # Triangular: the eigenvalues are the diagonal, and the first row sees itself only.
        return torch.cat(
            [heads.mix.new_zeros(heads.mix.shape[0], 1), _diagonal(heads)[:, 1:]], 1
        ).amax(1)
    if heads.kind == "lln":
        # A·B and B·A have the same eigenvalues but for zeros.
        slots, tokens = heads.lln_factors()
        return second_moduli(tokens @ slots)
    if heads.is_near and heads.window == 0 and bool(heads.block[0] != heads.block[-1]):
        # Every block has an eigenvalue 1 of its own.
        return heads.mix.new_ones(heads.mix.shape[0])
    found = [_of_one(heads.part(index, index + 1)) for index in range(heads.query.shape[0])]
    return torch.tensor(found, dtype=torch.float64, device=heads.query.device)


def _of_one(heads: UnmaskedHeads) -> float:
    size = heads.query.shape[1]
    factored = size > DENSE and (heads.kind == "lln_diag" or _keys_fit(heads))
    if size * size <= KEPT and not factored:
        return second_modulus(_formed(heads))
    return second_modulus_of_product(_product(heads), size, heads.query.device)


def _formed(heads: UnmaskedHeads) -> Tensor:
    """The matrix ``[N, N]`` of one short head."""
    matrix = heads.query.new_zeros(heads.query.shape[1], heads.key.shape[1])
    for tile in AttentionRows(heads).tiles():
        p = tile.p[0]
        matrix[tile.row : tile.row + p.shape[0], tile.column : tile.column + p.shape[1]] = p
    return matrix


def _product(heads: UnmaskedHeads) -> Product:
    """Multiplication with P of one head; the diagonal blocks are kept if small."""
    if heads.kind == "lln_diag":
        slots, tokens = (side[0] for side in heads.lln_factors())
        short_range, mix = _product(replace(heads, kind="diag")), heads.mix[0]
        return lambda x: mix * (slots @ (tokens @ x)) + (1 - mix) * short_range(x)
    if _keys_fit(heads):
        return _keys_product(heads)
    if heads.kind == "diag":
        start, members = _blocks(heads.block)
        if start.shape[0] * int(members.max()) ** 2 <= KEPT:
            return _block_product(heads, start, members)
    rows = AttentionRows(heads)

    def tiles() -> Iterable[tuple[Tensor, int]]:
        return ((tile.p[0], tile.column) for tile in rows.tiles())

    kept = list(tiles()) if rows.shape[1] * rows.width <= KEPT else None

    def product(x: Tensor) -> Tensor:
        read = tiles() if kept is None else kept
        return torch.cat([p @ x[column : column + p.shape[-1]] for p, column in read])

    return product


def _keys_fit(heads: UnmaskedHeads) -> bool:
    """Whether the weights of exact keys can be kept between products."""
    if heads.chosen is None:
        return False
    exact = int(_blocks(heads.block)[1].max()) + heads.chosen.indices.shape[-1]
    return heads.query.shape[1] * exact <= KEPT


def _keys_product(heads: UnmaskedHeads) -> Product:
    """Multiplication with P of one head: weights of block, chosen keys and slots, kept apart."""
    chosen = heads.chosen
    assert chosen is not None
    start, members = _blocks(heads.block)
    _, number = heads.block.unique_consecutive(return_inverse=True)
    step = torch.arange(int(members.max()), device=start.device)
    near = torch.where(step < members[:, None], start[:, None] + step, -1)
    shift, level = (side[0] for side in heads.slot_shifts())
    exponent = heads.beta[0] * heads.key[0]
    slots = heads.alpha[0] * heads.query[0] + shift + exponent.logsumexp(0) + level
    tokens = exponent.softmax(0).mT
    kept: list[tuple[Tensor, Tensor]] = []
    width = near.shape[1] + chosen.indices.shape[-1]
    for rows in torch.arange(slots.shape[0], device=start.device).split(
        max(TILE // (width * heads.key.shape[-1]), 1)
    ):
        place = torch.cat([near[number[rows]], chosen.indices[0, chosen.group[rows]]], -1)
        query = heads.scale * heads.query[0, rows]
        scores = (heads.key[0, place.clamp_min(0)] @ query.unsqueeze(-1)).squeeze(-1)
        scores = scores.masked_fill(place < 0, -torch.inf)
        weights = torch.cat([scores, slots[rows]], -1).softmax(-1)
        slots[rows] = weights[:, width:]
        kept.append((weights[:, :width].clone(), place.clamp_min(0)))

    def product(x: Tensor) -> Tensor:
        exact = [(weights.unsqueeze(1) @ x[place]).squeeze(1) for weights, place in kept]
        return torch.cat(exact) + slots @ (tokens @ x)

    return product


def _block_product(heads: UnmaskedHeads, start: Tensor, members: Tensor) -> Product:
    """Multiplication with the diagonal blocks, kept as ``[n, b, b]``."""
    step = torch.arange(int(members.max()), device=start.device)
    inside = step < members[:, None]
    place = torch.where(inside, start[:, None] + step, 0)
    scores = heads.scale * heads.query[0, place] @ heads.key[0, place].mT
    weights = scores.masked_fill(~inside[:, None], -torch.inf).softmax(-1)
    return lambda x: (weights @ torch.where(inside[..., None], x[place], 0.0))[inside]


def _blocks(block: Tensor) -> tuple[Tensor, Tensor]:
    """The first token and the number of tokens of every diagonal block."""
    members = block.unique_consecutive(return_counts=True)[1]
    return members.cumsum(0) - members, members


def _diagonal(heads: UnmaskedHeads) -> Tensor:
    """P_ii of causal attention, ``[G, T]``."""
    if heads.kind == "lln_diag":
        parts = (_diagonal(replace(heads, kind=kind)) for kind in ("lln", "diag"))
        long_range, short_range = parts
        mix = heads.mix.squeeze(-1)
        return mix * long_range + (1 - mix) * short_range
    if heads.kind == "lln":
        exponent_q, exponent_k = heads.alpha * heads.query, heads.beta * heads.key
        mass = (exponent_q + exponent_k.logcumsumexp(-2)).logsumexp(-1)
        return ((exponent_q + exponent_k).logsumexp(-1) - mass).exp()
    found = []
    for part in AttentionRows(heads).slices():
        own = [tile.log_p.diagonal(tile.row - tile.column, -2, -1) for tile in part.tiles()]
        found.append(torch.cat(own, -1).exp())
    return torch.cat(found)
