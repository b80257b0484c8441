"""What only a real device can show: sizes, streams, graphs, memory that runs out."""

import warnings
from dataclasses import fields

import pytest
import torch
from tests.kernels.common import compare
from torch.utils.checkpoint import checkpoint

import lln
from lln.kernels.launching import sizes
from lln.kernels.launching.stretches import Tile
from lln.testing import assert_close, make_qkv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GIVEN = {"alpha": 2.0, "beta": 2.0}
KINDS = {
    "lln": lambda *inputs: lln.lln_attention(*inputs, **GIVEN, impl="triton"),
    "lln_diag": lambda *inputs: lln.lln_diag_attention(
        *inputs, **GIVEN, block_size=64, impl="triton"
    ),
    "diag": lambda *inputs: lln.block_diagonal_attention(*inputs, block_size=64, impl="triton"),
    "causal": lambda *inputs: lln.lln_attention(*inputs, **GIVEN, is_causal=True, impl="triton"),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def some(tokens=300, seed=0, **options):
    shape = {"batch": 2, "heads": 3, "tokens": tokens, "width": 64, **options}
    shape |= {"dtype": torch.bfloat16, "device": "cuda", "requires_grad": True, "seed": seed}
    return make_qkv(**shape)


def with_gradients(attend, inputs):
    out = attend(*inputs)
    return out, *torch.autograd.grad(out, inputs, torch.ones_like(out))


@pytest.fixture
def room():
    """Skip on small cards; leave nothing behind."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 90 * 2**30:
        pytest.skip("needs 90 GB of GPU memory")
    yield
    torch.cuda.empty_cache()


@kinds
def test_past_2_to_the_31_elements(kind, room):
    """The last sample lies beyond 2³¹ elements; tokens in Hugging Face's order, a prime number."""
    batch, heads, tokens, width = 3, 12, 1_000_003, 64
    assert batch * heads * tokens * width > 2**31
    shape = (batch, tokens, heads, width)
    inputs = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for _ in range(3)
    ]
    out = KINDS[kind](*inputs)
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, upstream)
    head = (slice(batch - 1, batch), slice(heads - 1, heads))
    options = dict(GIVEN)
    attend = lln.lln_attention
    if kind == "lln_diag":
        attend, options = lln.lln_diag_attention, {**GIVEN, "block_size": 64}
    if kind == "diag":
        attend, options = lln.block_diagonal_attention, {"block_size": 64}
    if kind == "causal":
        options["is_causal"] = True

    def again(dtype):
        part = [tensor[head].detach().to(dtype).requires_grad_() for tensor in inputs]
        plain = attend(*part, **options, impl="eager")
        return plain, torch.autograd.grad(plain, part, upstream[head].to(dtype))

    expected, expected_grads = again(torch.float64)
    eager, eager_grads = again(torch.bfloat16)
    for rows in (slice(0, 999), slice(tokens - 999, None)):
        tail = (slice(None), slice(None), rows)
        assert_close(out[head][tail], expected[tail], eager[tail])
        for got, want, plain in zip(grads, expected_grads, eager_grads, strict=True):
            size = want.abs().max().item()
            sides = (got[head][tail], want[tail], plain[tail])
            assert_close(*sides, backward=True, magnitude=size, what="gradient")


def test_one_sequence_past_2_to_the_31_elements(room):
    width = 64
    tokens = 2**31 // width + 5
    query, key, value = (
        torch.randn(1, 1, tokens, width, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    summary = lln.KeySummary.empty(1, 1, width, width, 2.0, device="cuda", dtype=torch.float64)
    for part in range(0, tokens, 2**20):
        rows = slice(part, part + 2**20)
        summary.append(key[:, :, rows].double(), value[:, :, rows].double())
    last = query[:, :, -777:]
    expected = summary.read(last.double(), 2.0)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    out = lln.lln_attention(*inputs, **GIVEN, impl="triton")
    assert_close(out[:, :, -777:], expected)
    upstream = torch.randn_like(out)
    *_, value_grad = torch.autograd.grad(out, inputs, upstream)
    # Rows of P sum to 1, so the gradients of all values add up to the gradients of all outputs.
    found, wanted = (side.double().sum((0, 1, 2)) for side in (value_grad, upstream))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.02 * tokens**0.5)


@kinds
def test_out_of_memory_leaves_the_process_usable(kind):
    inputs = some()
    before = with_gradients(KINDS[kind], inputs)
    large = some(tokens=2**15)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**21) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            with_gradients(KINDS[kind], large)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for got, want in zip(with_gradients(KINDS[kind], inputs), before, strict=True):
        assert torch.equal(got, want)
    assert with_gradients(KINDS[kind], large)[0].isfinite().all()


@kinds
def test_side_stream(kind):
    inputs = some()
    expected = with_gradients(KINDS[kind], inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = [torch.zeros_like(tensor) for tensor in inputs]
        # The inputs arrive a while after the launches were queued: another stream would see zeros.
        torch.cuda._sleep(50_000_000)
        for target, source in zip(late, inputs, strict=True):
            target.copy_(source.detach())
        found = with_gradients(KINDS[kind], [tensor.requires_grad_() for tensor in late])
    stream.synchronize()
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)


@kinds
def test_profilers_hear_of_repeated_launches(kind):
    hooks = pytest.importorskip("triton.knobs").runtime.launch_enter_hook
    attend, inputs = KINDS[kind], some()
    expected = with_gradients(attend, inputs)
    heard = []
    hooks.add(note := lambda launch: heard.append(launch.get()["name"]))
    try:
        out = attend(*inputs)
        forward = len(heard)
        gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
    finally:
        hooks.remove(note)
    assert len(heard) > forward > 0
    assert all(name.endswith("_kernel") for name in heard)
    assert all(torch.equal(a, b) for a, b in zip((out, *gradients), expected, strict=True))


@kinds
def test_cuda_graph_replays_on_new_numbers(kind):
    static = some()
    with_gradients(KINDS[kind], static)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        with_gradients(KINDS[kind], static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = with_gradients(KINDS[kind], static)
    fresh = some(seed=1)
    expected = with_gradients(KINDS[kind], fresh)
    with torch.no_grad():
        for target, source in zip(static, fresh, strict=True):
            target.copy_(source)
    graph.replay()
    for got, want in zip(captured, expected, strict=True):
        assert torch.equal(got, want)


def test_replays_drop_other_keys():
    inputs = [tensor.detach() for tensor in some()]

    def attend():
        return lln.lln_attention(*inputs, **GIVEN, dropout_p=0.5, impl="triton")

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    draws = []
    for _ in range(2):
        graph.replay()
        draws.append(out.clone())
    assert not torch.equal(*draws)


@kinds
def test_activation_checkpointing(kind):
    inputs = some()
    expected = with_gradients(KINDS[kind], inputs)
    found = with_gradients(
        lambda *sides: checkpoint(KINDS[kind], *sides, use_reentrant=False), inputs
    )
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)


@kinds
def test_autocast(kind):
    inputs = [tensor.detach().float().requires_grad_() for tensor in some()]
    with torch.autocast("cuda", torch.bfloat16):
        out = KINDS[kind](*inputs)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, KINDS[kind](*(tensor.bfloat16() for tensor in inputs)))
    grads = torch.autograd.grad(out.float().sum(), inputs)
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads)


@kinds
def test_nothing_waits_for_the_device(kind):
    inputs = some()
    with_gradients(KINDS[kind], inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        with_gradients(KINDS[kind], inputs)
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("default")


def shrunk_tiles(steps):
    """The tiles of a head of 64 after so many times of not fitting the chip."""
    tensor = torch.empty(2, 3, 300, 64, device="cuda", dtype=torch.bfloat16)
    chosen = sizes.choose_sizes(tensor, tensor, tensor, 2, 3, 0)
    for _ in range(steps):
        chosen = sizes.smaller(chosen)
    tiles = {field.name: getattr(chosen, field.name) for field in fields(chosen)}
    return {name: tile for name, tile in tiles.items() if isinstance(tile, Tile)}


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_all_smaller_sizes(steps, causal):
    sizes.overrides.update(shrunk_tiles(steps))
    try:
        compare(torch.bfloat16, tokens=300, width=64, is_causal=causal)
    finally:
        sizes.overrides.clear()


def test_the_chain_of_sizes_ends_there():
    tiles = shrunk_tiles(4)
    free = [name for name in tiles if not name.startswith("joint")]
    assert {tiles[name].tokens for name in free} == {16}
    assert {tile.stages for tile in tiles.values()} == {1}
    tensor = torch.empty(2, 3, 300, 64, device="cuda", dtype=torch.bfloat16)
    chosen = sizes.choose_sizes(tensor, tensor, tensor, 2, 3, 0)
    for _ in range(5):
        chosen = chosen and sizes.smaller(chosen)
    assert chosen is None


@pytest.mark.parametrize("name", ["summarise", "read", "query_grad", "key_grad"])
@pytest.mark.parametrize("tile", [(32, 4), (64, 8), (128, 4), (128, 8)])
def test_other_tiles(name, tile):
    """Tiles nobody ships yet, so that the next tuning starts from kernels that are right."""
    sizes.overrides[name] = Tile(*tile, 2, 4)
    try:
        compare(torch.bfloat16, tokens=300, width=64)
    finally:
        sizes.overrides.clear()
