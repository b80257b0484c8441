"""The steps that every kernel is made of: load, exponents, softmax rows, block-diagonal rows.

Exponents α·q and β·k are shifted before they are scaled for exp2, the only such instruction that
the hardware has: a large exponent then loses no more digits than in plain PyTorch. ``NEVER`` stands
for log 0. A *slot* is one of the D entries of the summary (`lln.eager.summary`).

Tiles reach the registers *through the tensor cores*: a product with the identity costs next to
nothing and puts the numbers, widened to float32, in the layout of later products. Softmax rows then
lie within four threads, weights feed the next product directly from registers, and no tile goes
through shared memory. For the keys the product is I·kᵀ, which puts a slot's tokens in one row, so
that the running maximum over tokens is a row maximum too.

``EVEN`` means that every tile is full and no key is masked; all row masks are then left out.

Dimension legend: BT tokens in a tile, BD ≥ D and BE ≥ E padded widths (powers of two).
Names: ``b_*`` values of a tile, ``p_*`` pointers, capitals are compile-time constants. Tensors
are q, k, v, o (output), g (dO), m (mix), dq, dk and dv, with strides ``stride_qb``, ``_qh`` …
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Finite, so that NEVER − NEVER is 0 and not NaN.
NEVER = tl.constexpr(-1e30)
# A wider identity would cost more on the chip than it saves.
WIDEST_IDENTITY = tl.constexpr(128)
LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def exponential(b_x):
    """e^x, results below the normal range flushed to zero: one instruction instead of four."""
    if INTERPRETED:
        return tl.exp(b_x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;",
        "=f,f",
        [b_x * LOG2E],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def rows_of(p_first, batch, head, begin, stride_b, stride_h, stride_t, stride_d):
    """The rows of a head from a sequence's first token on.

    ``rows`` in other steps is this: a pointer, and the strides of heads, tokens and channels.
    """
    p_rows = p_first + (batch * stride_b + begin * stride_t + head * stride_h)
    return p_rows, stride_h, stride_t, stride_d


@triton.jit
def heads_on(rows, heads):
    """The rows of the head that is ``heads`` heads later."""
    p_rows, stride_h, stride_t, stride_d = rows
    return p_rows + heads * stride_h, stride_h, stride_t, stride_d


@triton.jit
def load_rows(
    rows, first, row_ok,
    BT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The tile ``[BT, BD]`` from token ``first`` on; zero outside."""
    p_rows, _, stride_t, stride_d = rows
    tokens, columns = tl.arange(0, BT), tl.arange(0, BD)
    p_tile = p_rows + tl.cast(first, tl.int64) * stride_t
    p_in = p_tile + tokens[:, None] * stride_t + columns[None, :] * stride_d
    if EVEN and D == BD:
        return tl.load(p_in)
    if EVEN:
        return tl.load(p_in, mask=(columns < D)[None, :], other=0)
    if D == BD:
        return tl.load(p_in, mask=row_ok[:, None], other=0)
    return tl.load(p_in, mask=row_ok[:, None] & (columns < D)[None, :], other=0)


@triton.jit
def store_rows(
    rows, first, b_tile, row_ok,
    BT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write a tile ``[BT, BD]`` back."""
    p_rows, _, stride_t, stride_d = rows
    tokens, columns = tl.arange(0, BT), tl.arange(0, BD)
    p_tile = p_rows + tl.cast(first, tl.int64) * stride_t
    p_out = p_tile + tokens[:, None] * stride_t + columns[None, :] * stride_d
    b_out = b_tile.to(p_rows.dtype.element_ty)
    if EVEN and D == BD:
        tl.store(p_out, b_out)
    elif EVEN:
        tl.store(p_out, b_out, mask=(columns < D)[None, :])
    else:
        tl.store(p_out, b_out, mask=row_ok[:, None] & (columns < D)[None, :])


@triton.jit
def load_queries(
    rows, first, inside, ok,
    BT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, QUIET: tl.constexpr,
):  # fmt: skip
    """A tile of queries; QUIET: NaN and infinity in padded ones become zero."""
    b_q = load_rows(rows, first, inside, BT, D, BD, EVEN)
    if QUIET:
        b_q = quiet_rows(b_q, ok)
    return b_q


@triton.jit
def load_unmasked(
    rows, first, inside, ok,
    BT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr,
    HAS_MASK: tl.constexpr,
):  # fmt: skip
    """A tile of keys or values; masked rows are zero."""
    b_tile = load_rows(rows, first, inside, BT, D, BD, EVEN)
    if HAS_MASK:
        b_tile = hide_rows(b_tile, ok)
    return b_tile


@triton.jit
def load_values(
    rows, first, inside, ok, seed, drop_first, dropout_p,
    BT: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, EVEN: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """A tile of values, masked and dropped ones zero, and the dropout factors ``[BT]``."""
    b_v = load_unmasked(rows, first, inside, ok, BT, E, BE, EVEN, HAS_MASK)
    b_factor = tl.full([BT], 1.0, tl.float32)
    if HAS_DROPOUT:
        b_factor = drop_factor(seed, drop_first + first, dropout_p, BT)
        b_v = (b_v.to(tl.float32) * b_factor[:, None]).to(b_v.dtype)
    return b_v, b_factor


@triton.jit
def load_scale(p_scale, number, index, HAS_TENSOR: tl.constexpr):
    """α or β: a number, or the entry of a tensor."""
    if HAS_TENSOR:
        return tl.load(p_scale + index).to(tl.float32)
    return number


@triton.jit
def locate(p_starts, batch, tokens, PACKED: tl.constexpr):
    """Where a sequence (a sample, or a packed sequence) begins, and how long it is."""
    if PACKED:
        begin = tl.load(p_starts + batch).to(tl.int64)
        return begin, (tl.load(p_starts + batch + 1) - begin).to(tl.int32)
    return tl.cast(0, tl.int64), tokens


@triton.jit
def gap_before(p_starts, batch, SHIFTED: tl.constexpr):
    """How far before token 0 the first block of a sample begins; see `gap_kernel`."""
    if SHIFTED:
        return tl.load(p_starts + batch)
    return 0


@triton.jit
def find_program():
    """A program's stretch (share of the tokens), its (sample, head), and its index overall."""
    split, index = tl.program_id(0), tl.program_id(1).to(tl.int64)
    return split, index, index * tl.num_programs(0) + split


@triton.jit
def find_stretch(
    p_starts, split, index, program_tokens, T, H, PACKED: tl.constexpr, SHIFTED: tl.constexpr
):
    """Sample and head of a program, where their sequence begins, and the program's tokens."""
    batch, head = index // H, index % H
    begin, tokens = locate(p_starts, batch, T, PACKED)
    start = split * program_tokens - gap_before(p_starts, batch, SHIFTED)
    return batch, head, begin, start, tl.minimum(start + program_tokens, tokens)


@triton.jit
def rows_inside(first, end, BT: tl.constexpr, HAS_MASK: tl.constexpr):
    """Which rows of a tile are tokens; only with a mask may a tile begin before token 0."""
    tokens = first + tl.arange(0, BT)
    if HAS_MASK:
        return (tokens >= 0) & (tokens < end)
    return tokens < end


@triton.jit
def token_ok(p_mask, first, end, BT: tl.constexpr, HAS_MASK: tl.constexpr):
    """Which tokens of a tile exist and are not masked."""
    ok = rows_inside(first, end, BT, HAS_MASK)
    if HAS_MASK:
        ok = ok & (tl.load(p_mask + first + tl.arange(0, BT), mask=ok, other=0) != 0)
    return ok


@triton.jit
def drop_factor(seed, first, dropout_p, BT: tl.constexpr):
    """0 or 1/(1 − p) for every token of a tile, from its index in the whole tensor."""
    places = first + tl.arange(0, BT)
    return tl.where(tl.rand(seed, places) >= dropout_p, 1.0 / (1.0 - dropout_p), 0.0)


@triton.jit
def hide_rows(b_tile, ok):
    """Zero masked rows by selection: multiplying would turn a NaN there into 0 · NaN."""
    return tl.where(ok[:, None], b_tile, tl.zeros_like(b_tile))


@triton.jit
def quiet_rows(b_q, ok):
    """Zero NaN and infinity in padded queries: 0 · NaN would reach the gradient of every key."""
    finite = (b_q - b_q) == 0
    return tl.where(ok[:, None] | finite, b_q, tl.zeros_like(b_q))


@triton.jit
def identity(BD: tl.constexpr, dtype: tl.constexpr):
    """The identity matrix ``[BD, BD]``."""
    slots = tl.arange(0, BD)
    return (slots[:, None] == slots[None, :]).to(dtype)


@triton.jit
def widen(b_tile, BD: tl.constexpr):
    """A tile ``[BT, BD]`` in float32, in the layout of products."""
    # Two conditions, because Triton 3.3 cannot combine them with ``or``.
    if b_tile.dtype == tl.float32:
        return b_tile
    if BD > WIDEST_IDENTITY:
        return b_tile.to(tl.float32)
    return tl.dot(b_tile, identity(BD, b_tile.dtype))


@triton.jit
def widen_turned(b_tile, BD: tl.constexpr):
    """The transpose ``[BD, BT]`` of a tile in float32, in the layout of products."""
    if b_tile.dtype == tl.float32:
        return tl.trans(b_tile)
    if BD > WIDEST_IDENTITY:
        return tl.trans(b_tile.to(tl.float32))
    return tl.dot(identity(BD, b_tile.dtype), tl.trans(b_tile))


@triton.jit
def key_exponents(b_k, beta, ok, BD: tl.constexpr, EVEN: tl.constexpr):
    """β·k ``[BT, BD]``; ``NEVER`` for tokens that are masked or beyond the end."""
    b_x = widen(b_k, BD) * beta
    if not EVEN:
        b_x = tl.where(ok[:, None], b_x, NEVER)
    return b_x


@triton.jit
def slot_softmax(b_q, alpha, b_log_mass, D: tl.constexpr, BD: tl.constexpr):
    """Rows of A: unnormalised softmax over the slots ``[BT, BD]``, and the normalisers ``[BT]``."""
    b_x = widen(b_q, BD) * alpha + b_log_mass[None, :]
    if D < BD:
        b_x = tl.where((tl.arange(0, BD) < D)[None, :], b_x, NEVER)
    b_e = exponential(b_x - tl.max(b_x, 1)[:, None])
    return b_e, tl.sum(b_e, 1)


@triton.jit
def block_scores(
    b_q, b_k, scale, ok, block_size,
    BT: tl.constexpr, EVEN: tl.constexpr, ONE_BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of the block-diagonal matrix ``[BT, BT]``; ``NEVER`` where a row sees no key."""
    rows = tl.arange(0, BT)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
    if not ONE_BLOCK:
        same = (rows // block_size)[:, None] == (rows // block_size)[None, :]
        b_s = tl.where(same, b_s, NEVER)
    if not EVEN:
        b_s = tl.where(ok[None, :], b_s, NEVER)
    if CAUSAL:
        b_s = tl.where(rows[:, None] >= rows[None, :], b_s, NEVER)
    return b_s


@triton.jit
def block_softmax(
    b_q, b_k, scale, ok, block_size,
    BT: tl.constexpr, EVEN: tl.constexpr, ONE_BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of the block-diagonal matrix: unnormalised ``[BT, BT]`` and normalisers ``[BT]``.

    A tile begins with a block.
    """
    b_s = block_scores(b_q, b_k, scale, ok, block_size, BT, EVEN, ONE_BLOCK, CAUSAL, PRECISION)
    b_p = exponential(b_s - tl.max(b_s, 1)[:, None])
    if not EVEN:
        # In a row that sees no key every entry is 2^0; such a row must get weight zero.
        b_p = tl.where(b_s > NEVER * 0.5, b_p, 0.0)
    b_sum = tl.sum(b_p, 1)
    if not EVEN:
        b_sum = tl.where(b_sum > 0, b_sum, 1.0)
    return b_p, b_sum


@triton.jit
def add_tile(b_peak, b_mass, b_sum, b_x, b_v, PRECISION: tl.constexpr):
    """Add exponents ``[BD, BT]`` and values ``[BT, BE]`` to a running summary ``[BD, BE]``."""
    b_new = tl.maximum(b_peak, tl.max(b_x, 1))
    b_shrink = exponential(b_peak - b_new)
    b_e = exponential(b_x - b_new[:, None])
    b_mass = b_mass * b_shrink + tl.sum(b_e, 1)
    b_sum = b_sum * b_shrink[:, None]
    b_sum = tl.dot(b_e.to(b_v.dtype), b_v, b_sum, input_precision=PRECISION)
    return b_new, b_mass, b_sum
