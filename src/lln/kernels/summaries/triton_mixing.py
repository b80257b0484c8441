"""The mix of the LLN part and the diagonal part: weights of rows, of outputs and of gradients.

MIX is the form of the LLN part's weight: 0 no diagonal part, 1 one number, 2 a value per row, 3 a
value per row and channel. With 3 the weight is applied to the gradient dO, and row weights are 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.launching.triton_steps import load_rows


@triton.jit
def row_weights(mixes, mix, first, inside, BT: tl.constexpr, MIX: tl.constexpr):
    """The weight of the LLN part in every row ``[BT]``."""
    if MIX == 2:
        p_m, _, stride_t, _ = mixes
        places = tl.cast(first, tl.int64) + tl.arange(0, BT)
        return tl.load(p_m + places * stride_t, mask=inside, other=0.0).to(tl.float32)
    if MIX == 1:
        return tl.full([BT], mix, tl.float32)
    return tl.full([BT], 1.0, tl.float32)


@triton.jit
def mix_outputs(
    b_o, b_norm, b_d, b_total, mixes, mix, first, inside,
    E: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr, MIX: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Combine the outputs of both parts, each with its normaliser: ``[BT, BE]``."""
    if MIX == 3:
        b_mix = load_rows(mixes, first, inside, BT, E, BE, EVEN).to(tl.float32)
        return b_o * b_mix / b_norm[:, None] + b_d * (1.0 - b_mix) / b_total[:, None]
    b_row = row_weights(mixes, mix, first, inside, BT, MIX)
    return b_o * (b_row / b_norm)[:, None] + b_d * ((1.0 - b_row) / b_total)[:, None]


@triton.jit
def load_gradient(
    gradients, mixes, mix, first, inside,
    E: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr, MIX: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A tile of dO, and how it is divided between the two parts.

    Returns:
        dO; dO of the LLN part and of the diagonal part; the rows' weights of each part.
    """
    b_do = load_rows(gradients, first, inside, BT, E, BE, EVEN)
    b_row = row_weights(mixes, mix, first, inside, BT, MIX)
    b_long, b_short, b_rest = b_do, b_do, 1.0 - b_row
    if MIX == 3:
        b_mix = load_rows(mixes, first, inside, BT, E, BE, EVEN).to(tl.float32)
        b_long = (b_do.to(tl.float32) * b_mix).to(b_do.dtype)
        b_short = (b_do.to(tl.float32) * (1.0 - b_mix)).to(b_do.dtype)
        b_rest = b_row
    return b_do, b_long, b_short, b_row, b_rest


@triton.jit
def mix_rows(index, first_query, begin, T, R: tl.constexpr, PACKED: tl.constexpr):
    """Index of a head's first row in the gradient of mix ``[B, H, T, ...]``."""
    if PACKED:
        return tl.cast(first_query, tl.int64) * T + begin
    return index * R * T
