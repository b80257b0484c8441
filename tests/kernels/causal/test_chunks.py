"""Causal attention by chunks: states in memory, one program per chunk, lost stretches repaired."""

import pytest
import torch
from tests.kernels.common import DEVICE, ON_GPU, compare, holes, upstream_of

import lln
from lln.functional import prepared_calls
from lln.kernels.causal import launch_causal, launch_chunks
from lln.kernels.launching import recipes, sizes
from lln.kernels.launching.stretches import Tile
from lln.testing import assert_close, make_qkv, poison_empty

# Chunks are for bfloat16 and 64 channels; the interpreter does not have the one, and takes long
# for the other.
DTYPE, WIDTH, ROWS = (torch.bfloat16, 64, 64) if ON_GPU else (torch.float32, 16, 16)
HERE = {"dtype": DTYPE, "width": WIDTH, "is_causal": True}
GIVEN = {"alpha": 2.0, "beta": 2.0}


@pytest.fixture(params=["one stretch", "stretches"])
def chunks(request, monkeypatch):
    """Calls go by chunks, of 16 tokens in the interpreter; returns the cut of every recipe."""
    monkeypatch.setattr(recipes, "_recipes", {})
    prepared_calls.clear()
    sizes.overrides["cores"] = 1
    if request.param == "stretches":
        sizes.overrides["cores"] = 512
        monkeypatch.setattr(launch_chunks, "LEAST_CHUNKS", 1)
    if not ON_GPU:
        walks = ("walk", "walk_query", "walk_key", "summarise")
        for name in (*sizes.CHUNK_TILES, *walks):
            sizes.overrides[name] = Tile(16, 4, 1, 1)
        sizes.overrides |= {"has_chunks": True, "block_rows": 16}
    cuts = []
    of = launch_chunks.ChunkedCall.of

    def watch(call, chosen):
        cuts.append(of(call, chosen))
        return cuts[-1]

    monkeypatch.setattr(launch_causal.ChunkedCall, "of", watch)
    yield cuts
    sizes.overrides.clear()


@pytest.mark.parametrize("tokens", [1, 17, 64, 300, 512] if ON_GPU else [1, 40, 48])
def test_lengths(chunks, request, tokens):
    compare(tokens=tokens, **HERE)
    assert len(chunks) == 2
    many = "stretches" in request.node.callspec.id and tokens > ROWS
    assert all((cut.segments > 1) == many for cut in chunks)


@pytest.mark.parametrize("block_size", [ROWS, ROWS // 2])
@pytest.mark.parametrize("tokens", [3 * ROWS, 3 * ROWS - 7])
def test_blocks(chunks, block_size, tokens):
    compare(block_size=block_size, tokens=tokens, **HERE)
    assert None not in chunks


@pytest.mark.parametrize("width", [40, 48, 64] if ON_GPU else [12])
def test_widths_that_are_padded(chunks, width):
    compare(tokens=2 * ROWS, **HERE | {"width": width, "value_width": width - 3})
    assert None not in chunks


def fixed(block_size=0, key_heads=None, tokens=3 * ROWS, scale=1.0, heads=2, **extra):
    """Kernels against reference and eager, where α, β and mix ask for no gradient."""
    inputs = make_qkv(
        1, heads, tokens, WIDTH, key_heads=key_heads, dtype=DTYPE, device=DEVICE, scale=scale
    )
    options = GIVEN | {"is_causal": True, "enable_gqa": True}
    options |= {n: s.to(DEVICE) if torch.is_tensor(s) else s for n, s in extra.items()}
    attend = lln.lln_attention
    if block_size:
        attend, options["block_size"] = lln.lln_diag_attention, block_size
    found = {}
    for impl, dtype in (("triton", DTYPE), ("reference", torch.float64), ("eager", DTYPE)):
        sides = [side.detach().to(dtype).requires_grad_() for side in inputs]
        kinds = {
            n: s.to(dtype) if torch.is_tensor(s) and n == "mix" else s for n, s in options.items()
        }
        out = attend(*sides, **kinds, impl=impl)
        found[impl] = out, *torch.autograd.grad(out, sides, upstream_of(out))
    largest = max(side.abs().max().item() for side in found["reference"][1:])
    names = ("output", "dq", "dk", "dv")
    for name, *sides in zip(names, *found.values(), strict=True):
        size = None if name == "output" else largest
        assert_close(*sides, backward=name != "output", magnitude=size, what=name)


@pytest.mark.parametrize(
    "shape", [(1, 2, 1, 1), (1, 1, 3 * ROWS, 1), (1, 1, 1, WIDTH), (1, 2, 3 * ROWS, WIDTH)]
)
def test_mix_of_every_form(chunks, shape):
    fixed(block_size=ROWS, mix=torch.rand(shape))
    assert None not in chunks


def test_grouped_heads_with_temperatures_of_their_own(chunks):
    alpha, beta = torch.rand(1, 4, 1, 1) + 1, torch.rand(1, 4, 1, 1) + 1
    fixed(heads=4, key_heads=2, alpha=alpha, beta=beta)
    assert None not in chunks


@pytest.mark.parametrize(
    ("scale", "block_size"),
    [(30.0, ROWS), (1e4, 0), *([(30.0, 0), (1e4, ROWS)] if ON_GPU else [])],
)
def test_rows_that_the_guard_refuses_are_repaired(chunks, scale, block_size):
    fixed(block_size=block_size, scale=scale, alpha=1.0, beta=1.0, tokens=2 * ROWS + 8)
    assert None not in chunks


def test_a_later_key_far_above_the_earlier_ones(chunks):
    """Only the stretch of that key is lost; the rest of the sequence is as it was."""
    query, key, value = make_qkv(1, 1, 4 * ROWS, WIDTH, dtype=DTYPE, device=DEVICE)
    key[:, :, ROWS + 5] += 300.0
    options = {"alpha": 1.0, "beta": 1.0, "is_causal": True}
    found = lln.lln_attention(query, key, value, **options, impl="triton")
    wide = [side.double() for side in (query, key, value)]
    expected = lln.lln_attention(*wide, **options, impl="reference")
    assert_close(found, expected, lln.lln_attention(query, key, value, **options, impl="eager"))


def test_no_row_sees_the_future(chunks):
    query, key, value = make_qkv(1, 1, 3 * ROWS, WIDTH, dtype=DTYPE, device=DEVICE)
    options = GIVEN | {"is_causal": True, "impl": "triton", "block_size": ROWS}
    before = lln.lln_diag_attention(query, key, value, **options)
    later = ROWS + ROWS // 2
    for side in (query, key, value):
        side[:, :, later:] += 1.0
    after = lln.lln_diag_attention(query, key, value, **options)
    # A later key of the same chunk may move the common shift, and so the last digit.
    near = {"rtol": 2e-2, "atol": 2e-2} if ON_GPU else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(before[:, :, :later], after[:, :, :later], **near)
    assert (before[:, :, later:] - after[:, :, later:]).abs().max() > 0.1


def test_unwritten_memory_never_shows(chunks):
    inputs = make_qkv(1, 2, 3 * ROWS - 5, WIDTH, dtype=DTYPE, device=DEVICE, requires_grad=True)
    with poison_empty():
        out = lln.lln_diag_attention(
            *inputs, **GIVEN, block_size=ROWS, is_causal=True, impl="triton"
        )
        grads = torch.autograd.grad(out.sum(), inputs)
    assert all(side.isfinite().all() for side in (out, *grads))


def test_bit_equal_over_repetitions(chunks):
    inputs = make_qkv(2, 1, 3 * ROWS, WIDTH, dtype=DTYPE, device=DEVICE, requires_grad=True)

    def outcome():
        out = lln.lln_attention(*inputs, **GIVEN, is_causal=True, impl="triton")
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    first = outcome()
    for _ in range(50 if ON_GPU else 1):
        for one, other in zip(first, outcome(), strict=True):
            assert torch.equal(one, other)


def test_calls_that_are_walked(chunks):
    """A mask, and blocks that do not divide a chunk."""
    for name in ("walk", "walk_query", "walk_key", "summarise", "block_rows"):
        sizes.overrides.pop(name, None)
    compare(tokens=2 * ROWS, block_size=7, **HERE)
    compare(tokens=2 * ROWS, key_mask=holes(2, 2 * ROWS), **HERE)
    assert chunks == [None] * len(chunks)


def test_gradients_of_temperatures_are_those_of_the_walk(chunks):
    """Bit by bit: only the forward pass goes by chunks."""
    inputs = make_qkv(1, 2, 2 * ROWS, WIDTH, dtype=DTYPE, device=DEVICE)
    alpha = torch.tensor([1.5, 2.0], device=DEVICE).view(1, 2, 1, 1).requires_grad_()
    options = {"alpha": alpha, "beta": 2.0, "is_causal": True, "impl": "triton"}
    found = []
    for has_chunks in (True, False):
        sizes.overrides["has_chunks"] = has_chunks
        out = lln.lln_attention(*inputs, **options)
        found += torch.autograd.grad(out, alpha, upstream_of(out))
    assert torch.equal(*found)
    # The backward passes did not even ask.
    by_chunks, by_walks = chunks
    assert by_chunks is not None
    assert by_walks is None


def test_stretches_are_long_enough_to_pay_for_their_scan(monkeypatch):
    """One sequence of 1,024 tokens stays whole, like 192 of any length; a long one is cut."""
    monkeypatch.setattr(sizes, "multiprocessors", lambda device: 132)
    for heads, tokens, most in ((1, 1024, 1), (1, 4096, 4), (12, 65536, 22), (192, 4096, 1)):
        side = torch.empty(1, heads, tokens, 64, dtype=torch.bfloat16, device="meta")
        call = launch_chunks.LLNCall(
            *(side,) * 3, *(None,) * 5, 1.0, 1.0, 1.0, 0, 1.0, 0.0, 0, True, 0
        )
        cut = launch_chunks.ChunkedCall.of(call, call.sizes(heads))
        assert cut.segments == most
        assert cut.stretch % cut.chosen.chunk.tokens == 0
