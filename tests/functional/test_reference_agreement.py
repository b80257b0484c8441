"""Eager attention against the float64 reference: outputs and every gradient, within budget.

The grid is a covering set, not a product: every size, mask, layout and dtype occurs, alone and
with the neighbours it is likely to clash with. The reference gets the very numbers that eager got
(low precision upcast, α and β included) and autograd differentiates it in float64.
"""

from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch
from tests.pairs import pairs
from tests.terms import kept_pairs, repeat_to, sizes_of_sums

from lln import (
    block_diagonal_attention,
    lln_attention,
    lln_attention_varlen,
    lln_diag_attention,
    lln_diag_attention_varlen,
    match_moments,
    reference,
)
from lln.testing import LAYOUTS, assert_close, make_qkv

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES = [FP64, FP32, BF16, FP16]
NAMES = ("query", "key", "value", "alpha", "beta", "mix")

LENGTHS = [0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 500, 1025]
WIDTHS = [1, 8, 16, 40, 64, 72, 80, 96, 128, 256]
MASKS = ["left", "right", "one_row", "all", "holes"]


def name_of(case):
    if isinstance(case, torch.dtype):
        return str(case).removeprefix("torch.")
    if isinstance(case, dict):
        return "-".join(f"{name}={size}" for name, size in case.items())
    return str(case)


def make_mask(kind, batch, keys):
    mask = torch.ones(batch, keys, dtype=torch.bool)
    if kind == "left":
        mask[:, : keys // 3] = False
    elif kind == "right":
        mask[:, -(-2 * keys // 3) :] = False
    elif kind == "one_row":
        mask[0] = False
    elif kind == "all":
        mask[:] = False
    elif kind == "holes":
        mask = torch.rand(batch, keys, generator=torch.Generator().manual_seed(5)) < 0.6
    return mask


def make_leaves(shape, dtype, mask=None, layout="contiguous", mix=None):
    """Leaves of the graph under test: q, k, v, then α, β in the accumulation dtype, then mix."""
    query, key, value = make_qkv(**shape, dtype=dtype, layout=layout, requires_grad=True)
    with torch.no_grad():
        alpha, beta = match_moments(query.double(), key.double(), key_mask=mask)
    wide = FP64 if dtype == FP64 else FP32
    leaves = [query, key, value, alpha.to(wide).requires_grad_(), beta.to(wide).requires_grad_()]
    if mix is not None:
        sizes = tuple(full if kept else 1 for full, kept in zip(query.shape, mix, strict=True))
        gate = torch.rand(sizes, generator=torch.Generator().manual_seed(6), dtype=FP64)
        leaves.append(gate.to(dtype).requires_grad_())
    return leaves


def upcast(leaves):
    return [leaf.detach().double().requires_grad_() for leaf in leaves]


def term_sizes(exact, exact_grads, upstream, token_axis, sums):
    """What the roundings of every gradient are measured against, where terms cancel.

    The gradients of query and key are differences of terms of size ``floor``; where they vanish
    (a softmax over one slot or one key), that is all there is to measure against, and all that
    rounds in the sums of such terms, the gradients of α and β.
    """
    query, _, value, *temperatures = (leaf.detach() for leaf in exact[:5])
    if not upstream.numel() or not value.numel():
        return {}
    factor = max(leaf.detach().abs().max().item() for leaf in (*exact[:2], *temperatures))
    floor = query.shape[token_axis] ** 0.5 * factor
    floor *= (upstream.norm(dim=-1).max() * value.norm(dim=-1).max()).item()
    sizes = dict(sums)
    for place, name in ((0, "query"), (1, "key")):
        if exact_grads[place].abs().max().item() >= 1e-13 * floor:
            continue
        sizes[name] = floor
        if temperatures:
            norm = exact[place].detach().norm(dim=(token_axis, -1)).max()
            sizes[("alpha", "beta")[place]] = (floor * norm / temperatures[place].min()).item()
    return sizes


def assert_agrees(found, expected, leaves, exact, sums_of=None, token_axis=-2):
    """Output and gradients of ``found`` (of ``leaves``) match those of ``expected`` (``exact``).

    sums_of: From the gradient sent up to the sizes of the gradients that are sums, by name.
    """
    assert found.dtype == leaves[0].dtype
    assert_close(found, expected)
    generator = torch.Generator().manual_seed(7)
    upstream = torch.randn(found.shape, generator=generator, dtype=FP64).to(found.dtype)
    grads = torch.autograd.grad(found, leaves, upstream)
    exact_grads = torch.autograd.grad(expected, exact, upstream.double())
    sums = {} if sums_of is None else sums_of(upstream)
    sizes = term_sizes(exact, exact_grads, upstream.double(), token_axis, sums)
    for name, leaf, grad, exact_grad in zip(NAMES, leaves, grads, exact_grads, strict=False):
        assert grad.dtype == leaf.dtype
        what = f"gradient of {name}"
        assert_close(grad, exact_grad, backward=True, magnitude=sizes.get(name), what=what)


def check_lln(shape, dtype, *, mask=None, causal=False, layout="contiguous"):
    keys = shape.get("keys", shape["tokens"])
    key_mask = None if mask is None else make_mask(mask, shape["batch"], keys)
    leaves = make_leaves(shape, dtype, key_mask, layout)
    query, key, value, alpha, beta = leaves
    found = lln_attention(
        *(query, key, value),
        **{"alpha": alpha, "beta": beta, "key_mask": key_mask, "is_causal": causal},
        enable_gqa=key.shape[1] != query.shape[1],
    )
    exact = upcast(leaves)
    keep = kept_pairs(key_mask, causal, shape["tokens"])
    pairs = repeat_to(query.shape[1], *exact[1:3])
    expected = reference.lln_attention(exact[0], *pairs, *exact[3:5], keep=keep)
    temperatures = dict(zip(("alpha", "beta"), exact[3:], strict=True))
    sums_of = partial(sizes_of_sums, exact[:3], **temperatures, keep=keep)
    assert_agrees(found, expected, leaves, exact, sums_of)


def check_diag(shape, dtype, *, mask=None, causal=False, block=None, mix=None, scale=None):
    key_mask = None if mask is None else make_mask(mask, shape["batch"], shape["tokens"])
    leaves = make_leaves(shape, dtype, key_mask, mix=mix)
    query, key, value, alpha, beta = leaves[:5]
    weight = {} if mix is None else {"mix": leaves[5]}
    found = lln_diag_attention(
        *(query, key, value),
        **{"alpha": alpha, "beta": beta, "key_mask": key_mask, "is_causal": causal},
        **{"block_size": block, "scale": scale, "enable_gqa": True},
        **weight,
    )
    exact = upcast(leaves)
    keep = kept_pairs(key_mask, causal, shape["tokens"])
    pairs = repeat_to(query.shape[1], *exact[1:3])
    sides = dict(zip(("alpha", "beta", "mix"), exact[3:], strict=False))
    sides |= {"block_size": block or query.shape[-1], "keep": keep, "scale": scale}
    expected = reference.lln_diag_attention(exact[0], *pairs, **sides)
    assert_agrees(found, expected, leaves, exact, partial(sizes_of_sums, exact[:3], **sides))


def sizes(batch=2, heads=3, tokens=17, width=16, **others):
    return {"batch": batch, "heads": heads, "tokens": tokens, "width": width, **others}


def small(tokens):
    """Sizes that keep the reference's T×S×D in bounds."""
    return sizes(1, 1, tokens, 4) if tokens > 200 else sizes(2, 3, tokens, 8)


@pairs(causal=[False, True], dtype=[FP64, FP32, BF16], tokens=LENGTHS)
def test_lengths(tokens, dtype, causal):
    check_lln(small(tokens), dtype, causal=causal)


@pairs(causal=[False, True], dtype=[FP64, FP32, FP16], width=WIDTHS)
def test_widths(width, dtype, causal):
    check_lln(sizes(1, 2, 33, width), dtype, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "shape",
    [
        sizes(1, 1, 65, 8, value_width=24),
        sizes(1, 2, 65, 40, value_width=1),
        sizes(1, 5, 20, 1, value_width=7),
        sizes(3, 12, 16, 8),
        sizes(0, 3, 16, 8),
        sizes(2, 4, 30, 16, key_heads=2),
        sizes(2, 12, 16, 8, key_heads=4, value_width=5),
        sizes(1, 5, 70, 8, key_heads=1),
    ],
    ids=name_of,
)
def test_shapes(shape, dtype, causal):
    check_lln(shape, dtype, causal=causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "shape",
    [
        sizes(2, 3, 5, 16, keys=129),
        sizes(2, 3, 129, 16, keys=5),
        sizes(1, 1, 1, 8, keys=500),
        sizes(1, 2, 65, 8, keys=1),
        sizes(1, 2, 9, 8, keys=0),
        sizes(1, 2, 0, 8, keys=9),
        sizes(2, 6, 17, 16, keys=40, key_heads=3, value_width=9),
    ],
    ids=name_of,
)
def test_cross_attention(shape, dtype):
    check_lln(shape, dtype)
    check_lln(shape, dtype, mask="right")


@pairs(causal=[False, True], dtype=DTYPES, mask=MASKS)
def test_masks(mask, dtype, causal):
    check_lln(sizes(2, 3, 129, 8), dtype, mask=mask, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("tokens", [1, 2, 500])
def test_masks_of_short_and_long_sequences(tokens, mask, causal):
    check_lln(sizes(2, 1, tokens, 3, key_heads=1), FP32, mask=mask, causal=causal)


@pairs(causal=[False, True], dtype=[FP64, FP32, BF16], layout=LAYOUTS)
def test_layouts(layout, dtype, causal):
    check_lln(sizes(3, 3, 70, 8), dtype, causal=causal, layout=layout, mask="holes")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "attend",
    [
        lambda *qkv: lln_attention(*qkv),
        lambda *qkv: lln_attention(*qkv, alpha=2.0, beta=2.0, is_causal=True),
        lambda *qkv: lln_diag_attention(*qkv, key_mask=make_mask("holes", 3, 20)),
        lambda *qkv: block_diagonal_attention(*qkv, block_size=7),
    ],
    ids=["lln", "causal", "diag", "block"],
)
def test_inputs_stay_unmodified(attend, layout):
    qkv = make_qkv(3, 2, 20, 8, layout=layout, requires_grad=True)
    before = [tensor.detach().clone() for tensor in qkv]
    strides = [tensor.stride() for tensor in qkv]
    attend(*qkv).square().sum().backward()
    assert all(map(torch.equal, qkv, before))
    assert [tensor.stride() for tensor in qkv] == strides


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [FP64, FP32], ids=name_of)
@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_scales(scale, dtype, causal):
    check_lln(sizes(1, 2, 200, 16, scale=scale), dtype, causal=causal)


@pairs(causal=[False, True], dtype=[FP64, FP32, FP16], tokens=[t for t in LENGTHS if t != 1025])
def test_diag_lengths(tokens, dtype, causal):
    check_diag(small(tokens), dtype, causal=causal)


@pairs(causal=[False, True], mask=[None, *MASKS], block=[1, 7, 64, 1000])
def test_diag_blocks(block, mask, causal):
    shape = sizes(2, 4, 70, 8, key_heads=2, value_width=5)
    check_diag(shape, FP32, mask=mask, causal=causal, block=block, scale=0.7)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "mix",
    [(0, 0, 0, 0), (0, 1, 0, 0), (0, 1, 0, 1), (1, 1, 1, 0), (1, 1, 1, 1)],
    ids=["number", "head", "head_channel", "token_gate", "full"],
)
def test_diag_mix(mix, dtype, causal):
    check_diag(sizes(2, 3, 40, 8), dtype, causal=causal, mix=mix, mask="holes")


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=name_of)
@pytest.mark.parametrize("mask", [None, *MASKS])
@pytest.mark.parametrize("causal", [False, True])
def test_block_diagonal(causal, mask, dtype):
    shape = sizes(2, 4, 40, 8, key_heads=2, value_width=11)
    key_mask = None if mask is None else make_mask(mask, 2, 40)
    leaves = make_leaves(shape, dtype)[:3]
    options = {"block_size": 16, "scale": 0.4}
    found = block_diagonal_attention(
        *leaves, **options, key_mask=key_mask, is_causal=causal, enable_gqa=True
    )
    exact = upcast(leaves)
    keep = kept_pairs(key_mask, causal, 40)
    pairs = repeat_to(4, *exact[1:])
    expected = reference.block_diagonal_attention(exact[0], *pairs, **options, keep=keep)
    assert_agrees(found, expected, leaves, exact)


PACKED = {
    "one": [37],
    "some": [5, 64, 1, 30],
    "empties": [0, 17, 0, 0, 65, 0],
    "singles": [1] * 9,
    "long": [129, 3, 200],
}


def packed_leaves(lengths, dtype, heads, key_heads, value_width):
    tokens, count = sum(lengths), len(lengths)
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=FP64)

    wide = FP64 if dtype == FP64 else FP32
    temperature = [(1.5 + torch.rand(count, heads, 1, 1, generator=generator)) for _ in range(2)]
    shapes = ((heads, 8), (key_heads, 8), (key_heads, value_width))
    packed = [normal(tokens, *shape).to(dtype).requires_grad_() for shape in shapes]
    return packed + [side.to(wide).requires_grad_() for side in temperature]


def packed_sequences(exact, lengths, causal, block):
    """The slice of every sequence, its own dense leaves, and the options of the reference."""
    for index, (start, end) in enumerate(pairwise(accumulate(lengths, initial=0))):
        inputs = [leaf[start:end].transpose(0, 1)[None] for leaf in exact[:3]]
        alpha, beta = (side[index : index + 1] for side in exact[3:5])
        options = {"alpha": alpha, "beta": beta, "keep": kept_pairs(None, causal, end - start)}
        if block is not None:
            options |= {"block_size": block, "mix": 0.3}
        yield slice(start, end), inputs, options


def packed_expected(exact, lengths, causal, block):
    """One reference call per sequence, on slices of the packed leaves."""
    attend = reference.lln_attention if block is None else reference.lln_diag_attention
    outs = []
    for _, (query, *pair), options in packed_sequences(exact, lengths, causal, block):
        out = attend(query, *repeat_to(query.shape[1], *pair), **options)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def packed_sums(upstream, exact, lengths, causal, block):
    """The largest sizes of α's and β's gradients over the sequences."""
    found = [
        sizes_of_sums(inputs, upstream[where].transpose(0, 1)[None], **options)
        for where, inputs, options in packed_sequences(exact, lengths, causal, block)
    ]
    return {name: max(sizes[name] for sizes in found) for name in ("alpha", "beta")}


@pairs(causal=[False, True], block=[None, 1, 8, 500], dtype=[FP64, FP32, BF16], packing=PACKED)
def test_varlen(packing, dtype, block, causal):
    lengths = PACKED[packing]
    heads = {"heads": 4, "key_heads": 2, "value_width": 5}
    leaves = packed_leaves(lengths, dtype, **heads)
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    options = {"alpha": leaves[3], "beta": leaves[4], "is_causal": causal, "enable_gqa": True}
    if block is None:
        found = lln_attention_varlen(*leaves[:3], cu_seqlens, **options)
    else:
        options |= {"block_size": block, "mix": 0.3}
        found = lln_diag_attention_varlen(*leaves[:3], cu_seqlens, **options)
    exact = upcast(leaves)
    expected = packed_expected(exact, lengths, causal, block)
    sums_of = partial(packed_sums, exact=exact, lengths=lengths, causal=causal, block=block)
    assert_agrees(found, expected, leaves, exact, sums_of, token_axis=0)


@pytest.mark.parametrize("criterion", ["variance", "entropy", "paper"])
@pytest.mark.parametrize("mask", [None, "holes"])
def test_matching_inside_is_matching_outside(criterion, mask):
    query, key, value = make_qkv(2, 3, 50, 16)
    key_mask = None if mask is None else make_mask(mask, 2, 50)
    scope = "tensor" if criterion == "paper" else "head"
    alpha, beta = match_moments(query, key, criterion=criterion, scope=scope, key_mask=key_mask)
    found = lln_attention(query, key, value, matching=criterion, key_mask=key_mask)
    keep = kept_pairs(key_mask, False, 50)
    exact = [tensor.double() for tensor in (query, key, value, alpha, beta)]
    assert_close(found, reference.lln_attention(*exact, keep=keep))


TEMPERATURES = {
    "number": lambda: 1.7,
    "scalar": lambda: torch.tensor(1.7),
    "vector": lambda: torch.tensor([1.7]),
    "head": lambda: torch.rand(4, 1, 1) + 1,
    "batch": lambda: torch.rand(2, 1, 1, 1) + 1,
    "full": lambda: torch.rand(2, 4, 1, 1) + 1,
    "double": lambda: torch.rand(2, 4, 1, 1, dtype=FP64) + 1,
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("alpha", TEMPERATURES)
@pytest.mark.parametrize("beta", [*TEMPERATURES, "key_head"])
def test_temperature_shapes(alpha, beta, causal):
    query, key, value = make_qkv(2, 4, 9, 8, key_heads=2)
    alpha = TEMPERATURES[alpha]()
    beta = torch.rand(2, 2, 1, 1) + 1 if beta == "key_head" else TEMPERATURES[beta]()
    options = {"is_causal": causal, "enable_gqa": True}
    found = lln_attention(query, key, value, alpha=alpha, beta=beta, **options)
    full = torch.as_tensor(beta).float().double()
    if full.dim() == 4 and full.shape[1] == 2:
        full = full.repeat_interleave(2, 1)
    alpha = torch.as_tensor(alpha).float().double()
    key, value = repeat_to(4, key.double(), value.double())
    keep = kept_pairs(None, causal, 9)
    assert_close(found, reference.lln_attention(query.double(), key, value, alpha, full, keep=keep))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=name_of)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("poisoned")
def test_results_do_not_come_from_fresh_memory(causal, dtype):
    check_lln(sizes(2, 4, 100, 8, key_heads=2), dtype, mask="holes", causal=causal)
    check_diag(sizes(2, 4, 100, 8, key_heads=2), dtype, mask="holes", causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, "left", "holes"])
@pytest.mark.parametrize("function", [lln_attention, lln_diag_attention])
def test_reference_implementation_takes_the_same_arguments(function, mask, causal):
    shape = sizes(2, 4, 70, 8, key_heads=2, value_width=5)
    key_mask = None if mask is None else make_mask(mask, 2, 70)
    inputs = make_qkv(**shape)
    options = {"alpha": 1.5, "beta": torch.rand(2, 2, 1, 1) + 1, "enable_gqa": True}
    options |= {"key_mask": key_mask, "is_causal": causal}
    found, wanted = (function(*inputs, **options, impl=impl) for impl in ("auto", "reference"))
    assert wanted.dtype == FP32
    assert_close(found, wanted.double())


@pytest.mark.parametrize("alpha", [1.5, (), (4, 1, 1), (3, 1, 1, 1), (3, 4, 1, 1)], ids=str)
@pytest.mark.parametrize("mix", [0.3, (), (5,), (4, 1), (20, 4, 1), (20, 1, 5)], ids=str)
def test_packed_reference_takes_the_same_arguments(alpha, mix):
    query, key, value = (torch.randn(20, heads, width) for heads, width in ((4, 8), (2, 8), (2, 5)))
    alpha, mix = (
        torch.rand(side) * 0.5 + scale if isinstance(side, tuple) else side
        for side, scale in ((alpha, 1.0), (mix, 0.2))
    )
    cu_seqlens = torch.tensor([0, 7, 7, 20])
    options = {"alpha": alpha, "beta": 2.0, "mix": mix, "enable_gqa": True}
    found, wanted = (
        lln_diag_attention_varlen(query, key, value, cu_seqlens, **options, impl=impl)
        for impl in ("eager", "reference")
    )
    assert_close(found, wanted.double())
