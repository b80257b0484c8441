"""Bidirectional and cross attention by the kernels, against the float64 reference."""

from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from tests.kernels.common import (
    DEVICE,
    DTYPES,
    HALF,
    ON_GPU,
    check_compiled,
    compare,
    holes,
    let_auto_take_kernels,
    limit_chips,
)

import lln
from lln.eager.dropout import drop_keys
from lln.functional import kernel_ways
from lln.kernels.launching import limits, sizes
from lln.kernels.summaries.triton_backward_ranges import centred_queries
from lln.testing import LAYOUTS, assert_close, make_qkv, poison_empty
from lln.testing.doctor import examine

NIGHT = pytest.mark.slow


@pytest.fixture(params=["short", "long"])
def way(request):
    """Both ways to cut a call into programs."""
    sizes.overrides["short"] = request.param == "short"
    yield request.param
    sizes.overrides.clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 17, 64, 150] if ON_GPU else [1, 40])
def test_lengths(way, dtype, tokens):
    compare(dtype, tokens=tokens)


WIDTHS = [(1, 1), (8, 24), (40, 16), (64, 64), (72, 80), (128, 128)]


@pytest.mark.parametrize(("width", "value_width"), WIDTHS if ON_GPU else WIDTHS[1:3])
def test_widths(way, width, value_width):
    compare(tokens=40, width=width, value_width=value_width)


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 2), (3, 1)])
@pytest.mark.parametrize("block_size", [None, 16])
def test_grouped_heads_share_a_summary(way, heads, key_heads, block_size):
    blocks = {} if block_size is None else {"block_size": block_size}
    compare(heads=heads, key_heads=key_heads, **blocks)


def test_beta_that_differs_within_a_group(way):
    extra = {"alpha": torch.rand(2, 4, 1, 1) + 1, "beta": torch.rand(2, 4, 1, 1) + 1}
    compare(heads=4, key_heads=2, extra=extra)


@pytest.mark.parametrize("shape", [(2, 1, 1, 1), ()])
def test_gradients_of_alpha_and_beta(way, shape):
    compare(extra={"alpha": torch.rand(shape) + 1, "beta": torch.rand(shape) + 1})


@pytest.mark.parametrize("block_size", [None, 16])
def test_gradients_of_alpha_and_beta_far_from_zero(way, block_size):
    """Sums of q and k times gradients that cancel: the mean must not weigh in."""
    blocks = {} if block_size is None else {"block_size": block_size}
    shape = (2, 1, 1, 1)
    extra = {"alpha": torch.rand(shape) + 1, "beta": torch.rand(shape) + 1}
    compare(extra=extra, offset=128.0, **blocks)


@triton.jit
def centre_kernel(p_q, p_e, p_out, ROWS: tl.constexpr, BD: tl.constexpr):
    places = tl.arange(0, ROWS)[:, None] * BD + tl.arange(0, BD)[None, :]
    b_e = tl.load(p_e + places)
    tl.store(p_out + places, centred_queries(tl.load(p_q + places), b_e, tl.sum(b_e, 1), BD))


def test_centred_queries_have_mean_zero_in_every_row():
    query, weight = torch.randn(16, 16, device=DEVICE) + 128, torch.rand(16, 16, device=DEVICE)
    out = torch.empty_like(query)
    centre_kernel[(1,)](query, weight, out, 16, 16)
    mean = (weight * query).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
    torch.testing.assert_close(out, query - mean, atol=1e-4, rtol=0)


@pytest.mark.parametrize("block_size", [1, 7, 16, 64, 100] if ON_GPU else [7, 40])
@pytest.mark.parametrize("dtype", [torch.float32, HALF[-1]])
def test_blocks(way, dtype, block_size):
    compare(dtype, block_size=block_size, tokens=130 if ON_GPU else 50)


@pytest.mark.parametrize("shape", [(2, 1, 70, 1), (1, 1, 16), (2, 1, 70, 16), (1, 1)])
def test_mix_and_its_gradient(way, shape):
    compare(extra={"alpha": 2.0, "beta": 2.0, "mix": torch.rand(shape)}, block_size=16)


@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("dtype", [torch.float32, HALF[-1]])
def test_masked_keys(way, dtype, block_size):
    blocks = {} if block_size is None else {"block_size": block_size}
    compare(dtype, key_mask=holes(2, 70), **blocks)


def test_cross_attention(way):
    compare(tokens=33, keys=150)
    compare(tokens=150, keys=33, key_mask=holes(2, 33))


@pytest.mark.parametrize("layout", LAYOUTS if ON_GPU else ["transposed", "strided_width"])
def test_layouts(way, layout):
    compare(HALF[-1], layout=layout, width=16, block_size=16)


def test_output_keeps_the_memory_order_of_the_query():
    query, key, value = make_qkv(layout="transposed", device=DEVICE)
    out = lln.lln_attention(query, key, value, alpha=1.0, beta=1.0, impl="triton")
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("block_size", [None, 16])
def test_nan_under_the_mask_has_no_effect(way, block_size):
    mask = holes(2, 70)
    blocks = {} if block_size is None else {"block_size": block_size}
    attend = lln.lln_diag_attention if blocks else lln.lln_attention

    def outcome(filling):
        inputs = make_qkv(2, 1, 70, 16, device=DEVICE)
        inputs = [t.masked_fill(~mask[:, None, :, None], filling).requires_grad_() for t in inputs]
        out = attend(*inputs, alpha=2.0, beta=2.0, key_mask=mask, impl="triton", **blocks)
        rows = torch.where(mask[:, None, :, None], out, 0.0)
        return rows, torch.autograd.grad(rows.sum(), inputs)

    (clean, clean_grads), (dirty, dirty_grads) = outcome(0.5), outcome(torch.nan)
    assert torch.equal(clean, dirty)
    for index, (one, other) in enumerate(zip(clean_grads, dirty_grads, strict=True)):
        keep = mask[:, None, :, None].expand_as(one)
        assert torch.equal(one[keep], other[keep]), index
        assert other.isfinite().all(), index


@pytest.mark.parametrize("bad", [torch.nan, pytest.param(torch.inf, marks=NIGHT)])
@pytest.mark.parametrize("blocks", [{}, {"block_size": 16}], ids=["lln", "diag"])
def test_non_finite_query_shows_in_its_own_row_or_head(way, blocks, bad):
    """In its row where α and β are given, in its head where they are measured on it."""
    attend = lln.lln_diag_attention if blocks else lln.lln_attention
    query, key, value = make_qkv(2, 2, 70, 16, device=DEVICE)
    spoilt = query.clone()
    spoilt[0, 1, 7, 2] = bad
    for given in ({"alpha": 2.0, "beta": 2.0}, {}):
        shared = {**given, **blocks, "impl": "triton"}
        clean, out = (attend(side, key, value, **shared) for side in (query, spoilt))
        place = (0, 1, 7) if given else (0, 1)
        assert not out[0, 1, 7].isfinite().any()
        assert given or not out[0, 1].isfinite().all(-1).any()
        out[place] = clean[place]
        assert torch.equal(out, clean)


def test_sequence_without_a_key_gives_zeros(way):
    inputs = make_qkv(2, 3, 70, 16, device=DEVICE, requires_grad=True)
    mask = torch.zeros(2, 70, dtype=torch.bool, device=DEVICE)
    out = lln.lln_diag_attention(*inputs, alpha=2.0, beta=2.0, key_mask=mask, impl="triton")
    assert torch.equal(out, torch.zeros_like(out))
    for gradient in torch.autograd.grad(out.sum(), inputs):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("shape", [(0, 3, 5, 5), (2, 3, 0, 5), (2, 3, 5, 0)])
def test_empty_inputs(way, shape):
    batch, heads, tokens, keys = shape
    inputs = make_qkv(batch, heads, tokens, 16, keys=keys, device=DEVICE, requires_grad=True)
    out = lln.lln_attention(*inputs, alpha=2.0, beta=2.0, impl="triton")
    assert torch.equal(out, torch.zeros(batch, heads, tokens, 16, device=DEVICE))
    for gradient in torch.autograd.grad(out.sum(), inputs):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("scale", [100.0, 1e4])
def test_large_inputs_stay_finite_and_right(way, scale):
    inputs = make_qkv(1, 2, 70, 16, scale=scale, device=DEVICE)
    found = lln.lln_attention(*inputs, alpha=1.0, beta=1.0, impl="triton")
    wide = [t.double() for t in inputs]
    expected = lln.lln_attention(*wide, alpha=1.0, beta=1.0, impl="reference")
    eager = lln.lln_attention(*inputs, alpha=1.0, beta=1.0, impl="eager")
    assert_close(found, expected, eager)


@pytest.mark.parametrize(("batch", "short"), [(2, False), (70_000, True)])
def test_more_heads_than_a_launch_can_split_get_a_program_each(batch, short):
    inputs = [torch.empty(batch, 1, 2048, 16, device="meta") for _ in range(3)]
    assert sizes.choose_sizes(*inputs, samples=batch, summary_heads=1, block_size=0).short == short


def test_matched_moments(way):
    compare(extra={"alpha": None, "beta": None}, tokens=100)


def test_unwritten_memory_never_shows(way):
    inputs = make_qkv(1, 2, 70, 24, device=DEVICE, requires_grad=True)
    options = {"alpha": 2.0, "beta": 2.0, "block_size": 16, "impl": "triton"}
    with poison_empty():
        out = lln.lln_diag_attention(*inputs, **options)
        grads = torch.autograd.grad(out.sum(), inputs)
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in grads)


def test_dropout_is_drawn_on_the_device_while_a_graph_is_recorded(way, monkeypatch):
    query, key, value = make_qkv(1, 2, 40, 16, device=DEVICE)
    options = {"alpha": 2.0, "beta": 2.0, "impl": "triton"}
    monkeypatch.setattr("lln.kernels.lln.run.is_capturing", lambda: True)
    torch.manual_seed(0)
    found = [lln.lln_attention(query, key, value, dropout_p=0.4, **options) for _ in range(2)]
    torch.manual_seed(0)
    dropped = [lln.lln_attention(query, key, drop_keys(value, 0.4), **options) for _ in range(2)]
    for one, other in zip(found, dropped, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(*found)


def test_dropout_drops_whole_keys_and_its_gradient_agrees(way):
    query, key, _ = make_qkv(1, 2, 70, 16, device=DEVICE, requires_grad=True)
    identity = torch.eye(70, device=DEVICE).expand(1, 2, -1, -1).clone().requires_grad_()
    torch.manual_seed(0)
    options = {"alpha": 2.0, "beta": 2.0, "dropout_p": 0.4, "impl": "triton"}
    dropped = lln.lln_attention(query, key, identity, **options)
    plain = lln.lln_attention(query, key, identity, alpha=2.0, beta=2.0, impl="eager")
    factor = (dropped / plain).detach().mean(2, keepdim=True)
    kept = factor > 0.5
    torch.testing.assert_close(factor[kept], torch.full_like(factor[kept], 1 / 0.6))
    assert torch.equal(dropped[(~kept).expand_as(dropped)].unique(), torch.zeros(1, device=DEVICE))
    assert 0.35 < kept.float().mean() < 0.85
    scaled = identity * (factor.mT * kept.mT)
    again = lln.lln_attention(query, key, scaled, alpha=2.0, beta=2.0, impl="eager")
    upstream = torch.randn_like(dropped)
    for one, other in zip(
        torch.autograd.grad(dropped, (query, key, identity), upstream),
        torch.autograd.grad(again, (query, key, identity), upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_compiles_whole_with_dynamic_shapes():
    check_compiled(partial(lln.lln_diag_attention, block_size=16, impl="triton"), 2, 3, (40, 50))


def test_bit_equal_over_repetitions(way):
    tokens = 300 if ON_GPU else 70
    inputs = make_qkv(2, 1, tokens, 16, device=DEVICE, requires_grad=True)
    options = {"alpha": 2.0, "beta": 2.0, "block_size": 16, "impl": "triton"}

    def outcome():
        out = lln.lln_diag_attention(*inputs, **options)
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    first = outcome()
    for _ in range(50 if ON_GPU else 1):
        for one, other in zip(first, outcome(), strict=True):
            assert torch.equal(one, other)


def test_refusals_name_the_way_out():
    inputs = make_qkv(1, 1, 8, 8, device=DEVICE, dtype=torch.float64)
    with pytest.raises(lln.BackendUnavailableError, match=r"float64.*impl='eager'"):
        lln.lln_attention(*inputs, impl="triton")
    inputs = make_qkv(1, 1, 8, 300, device=DEVICE)
    with pytest.raises(lln.BackendUnavailableError, match="widths up to 256"):
        lln.lln_attention(*inputs, impl="triton")


def test_doctor_looks_at_the_kernels_too():
    lines = []
    assert examine(lines.append)
    assert {line.split()[1] for line in lines if line.endswith("impl 'triton'")} == {"right:"}
    assert any("a usual call" in line for line in lines)


@pytest.mark.parametrize("block_size", [None, 16])
def test_wide_values_are_read_in_slices(monkeypatch, block_size):
    limit_chips(monkeypatch, summary_float32=16 * 16, joint_summary_float32=16 * 16)
    blocks = {} if block_size is None else {"block_size": block_size}
    extra = {"alpha": torch.rand(2, 1, 1, 1) + 1, "beta": torch.rand(2, 1, 1, 1) + 1}
    if blocks:
        extra["mix"] = torch.rand(1, 1, 40)
    compare(tokens=40, value_width=40, extra=extra, **blocks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [None, 16])
def test_values_much_wider_than_narrow_heads(dtype, block_size):
    """Slots are few, yet a tile of values has to fit the chip: 256 channels at a time."""
    blocks = {} if block_size is None else {"block_size": block_size}
    compare(dtype, tokens=20, heads=1, width=8, value_width=530, **blocks)


@pytest.fixture
def split(way, monkeypatch):
    """The diagonal's gradients by a pass of their own, as with wide heads."""
    monkeypatch.setitem(sizes.overrides, "split_blocks", True)


@pytest.mark.parametrize("block_size", [7, *(pytest.param(n, marks=NIGHT) for n in (16, 40))])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_blocks_by_themselves(split, dtype, block_size):
    compare(dtype, block_size=block_size)
    compare(dtype, block_size=block_size, key_mask=holes(2, 70))


def test_gradients_of_blocks_by_themselves_with_options(split):
    scales = {"alpha": torch.rand(2, 1, 1, 1) + 1, "beta": torch.rand(2, 1, 1, 1) + 1}
    compare(extra=scales, block_size=16, heads=4, key_heads=2, tokens=40)
    compare(extra={"alpha": 2.0, "beta": 2.0, "mix": 0.3}, block_size=16, layout="transposed")
    # dmix needs both parts at once.
    compare(extra=scales | {"mix": torch.rand(2, 1, 70, 1)}, block_size=16)


def test_a_gate_of_wide_heads():
    """dmix needs both parts in one pass, so that the values come in slices again."""
    extra = {"alpha": 2.0, "beta": 2.0, "mix": torch.rand(2, 1, 20, 1)}
    compare(HALF[-1], tokens=20, width=128, value_width=128, block_size=16, extra=extra)


@pytest.mark.parametrize("packed", [False, True])
def test_both_ways_to_the_gradients_of_blocks_agree(monkeypatch, packed):
    """With dropped keys, and in packed sequences, of which the reference has no seeded form."""
    inputs = make_qkv(1, 2, 70, 16, device=DEVICE, requires_grad=True)
    options = {"alpha": 2.0, "beta": 2.0, "block_size": 16, "impl": "triton", "dropout_p": 0.4}
    monkeypatch.setitem(sizes.overrides, "short", False)
    found = []
    for split in (False, True):
        monkeypatch.setitem(sizes.overrides, "split_blocks", split)
        torch.manual_seed(3)
        if packed:
            tokens_first = [side[0].transpose(0, 1) for side in inputs]
            bounds = torch.tensor([0, 23, 23, 70], device=DEVICE)
            out = lln.lln_diag_attention_varlen(*tokens_first, bounds, max_seqlen=47, **options)
        else:
            out = lln.lln_diag_attention(*inputs, **options)
        upstream = torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out)
        found.append(torch.autograd.grad(out, inputs, upstream))
    for one, other in zip(*found, strict=True):
        assert one.abs().max() > 0.01
        torch.testing.assert_close(one, other)


@pytest.fixture
def few_rows(monkeypatch):
    """A device whose launches have three rows of programs."""
    monkeypatch.setattr(limits, "MAX_GRID", 3)
    sizes._choose.cache_clear()
    yield
    sizes._choose.cache_clear()


def test_more_heads_than_a_launch_has_rows(few_rows):
    """Each head is then one program, wide heads too: their diagonal part gets no own pass."""
    query, key, value = make_qkv(2, 2, 20, 128, device=DEVICE, dtype=HALF[-1])
    chosen = sizes.choose_sizes(query, key, value, 2, 2, 16)
    assert chosen.short
    assert not chosen.split_blocks
    compare(HALF[-1], tokens=20, heads=2, width=128, value_width=128, block_size=16)


def test_blocks_beside_the_kernels(monkeypatch):
    """Blocks too large for a tile: the LLN part by the kernel, the diagonal in plain PyTorch."""
    limit_chips(monkeypatch, block_tokens=16)
    let_auto_take_kernels(monkeypatch)
    mask = holes(2, 70)
    extra = {"alpha": 2.0, "beta": 2.0, "mix": torch.rand(2, 1, 70, 1)}
    compare(block_size=40, key_mask=mask, extra=extra, impl="auto")
    compare(HALF[-1], block_size=40, key_mask=mask, impl="auto")
    compare(block_size=40, impl="auto")


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_in_a_kernel_beside_the_kernels(monkeypatch, dtype):
    """A chip with room for blocks and for a summary, but not for both at once."""
    limit_chips(monkeypatch, joint_tokens=0)
    taken, blocks = [], kernel_ways.fused_blocks
    monkeypatch.setattr(
        kernel_ways, "fused_blocks", lambda *a, **o: taken.append(1) or blocks(*a, **o)
    )
    compare(dtype, block_size=40, key_mask=holes(2, 70), extra={"alpha": 2.0, "beta": 2.0})
    compare(dtype, block_size=16, extra={"mix": torch.rand(2, 1, 70, 1)})
    monkeypatch.setattr(limits, "MAX_CAUSAL_BLOCK_BYTES", 0)
    compare(dtype, block_size=40, is_causal=True)
    assert len(taken) == 3


WIDE = [(128, 128), (144, 200), (256, 256)]


@pytest.mark.skipif(not ON_GPU, reason="too slow in the interpreter")
@pytest.mark.parametrize("block_size", [None, 64])
@pytest.mark.parametrize("dtype", [torch.float32, HALF[-1]])
@pytest.mark.parametrize(("width", "value_width"), WIDE)
def test_wide_heads(dtype, width, value_width, block_size):
    blocks = {} if block_size is None else {"block_size": block_size}
    # Blocks of 64 tokens by 144 or more channels in float32 fit no tile: only "auto" takes them.
    fits = block_size is None or dtype != torch.float32 or width <= 128
    impl = "triton" if fits else "auto"
    compare(dtype, tokens=130, width=width, value_width=value_width, impl=impl, **blocks)


def test_second_call_follows_the_recipe_of_the_first():
    """A recipe must serve other tensors, other numbers and other seeds of the same kind."""
    from lln.kernels.launching import recipes

    recipes._recipes.clear()
    outs = []
    for alpha, seed in ((1.5, 0), (2.5, 1)):
        query, key, value = make_qkv(1, 2, 40, 16, device=DEVICE, seed=seed)
        found = lln.lln_attention(query, key, value, alpha=alpha, beta=alpha, impl="triton")
        wide = [tensor.double() for tensor in (query, key, value)]
        expected = lln.lln_attention(*wide, alpha=alpha, beta=alpha, impl="reference")
        eager = lln.lln_attention(query, key, value, alpha=alpha, beta=alpha, impl="eager")
        assert_close(found, expected, eager)
        outs.append(found)
    assert len(recipes._recipes) == 1
    assert not torch.equal(*outs)


def test_recipes_keep_no_tensor_alive():
    import gc
    import weakref

    inputs = make_qkv(1, 2, 40, 16, device=DEVICE)
    lln.lln_attention(*inputs, alpha=2.0, beta=2.0, impl="triton")
    seen = [weakref.ref(tensor) for tensor in inputs]
    del inputs
    gc.collect()
    assert all(reference() is None for reference in seen)


def test_old_recipes_are_forgotten(monkeypatch):
    from lln.kernels.launching import recipes

    recipes._recipes.clear()
    monkeypatch.setattr(recipes, "MOST_RECIPES", 2)
    for tokens in (3, 4, 5):
        inputs = make_qkv(1, 1, tokens, 16, device=DEVICE)
        lln.lln_attention(*inputs, alpha=2.0, beta=2.0, impl="triton")
    assert len(recipes._recipes) == 2
