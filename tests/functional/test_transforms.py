"""Attention under torch.compile, torch.export, torch.func, autocast, checkpointing and fakes."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lln
from lln.testing import assert_close, make_qkv

D, BLOCK = 8, 16


def cu_seqlens(tokens):
    return torch.tensor([0, tokens // 3, tokens // 3, tokens])


FIXED = {"alpha": 1.5, "beta": 1.2}
CAUSAL = {**FIXED, "is_causal": True}
KEYS = {"block_size": BLOCK, "keys": 6}


FUNCTIONS = {
    "lln": lambda q, k, v: lln.lln_attention(q, k, v),
    "diag": lambda q, k, v: lln.lln_diag_attention(q, k, v, block_size=BLOCK),
    "block": lambda q, k, v: lln.block_diagonal_attention(q, k, v, block_size=BLOCK),
    "causal": lambda q, k, v: lln.lln_attention(q, k, v, **CAUSAL),
    "keys": lambda q, k, v: lln.lln_keys_attention(q, k, v, **KEYS, group_size=1),
    "varlen": lambda q, k, v, bounds: lln.lln_attention_varlen(q, k, v, bounds),
    "diag_varlen": lambda q, k, v, bounds: lln.lln_diag_attention_varlen(q, k, v, bounds),
    "causal_varlen": lambda q, k, v, bounds: lln.lln_attention_varlen(q, k, v, bounds, **CAUSAL),
    "keys_varlen": lambda q, k, v, bounds: lln.lln_keys_attention_varlen(q, k, v, bounds, **KEYS),
    "pages": lambda q, k, v: lln.page_attention(q, k, v, window=5, pages=3),
    "window": lambda q, k, v: lln.window_attention(q, k, v, window=5),
    "window_varlen": lambda q, k, v, bounds: lln.window_attention_varlen(q, k, v, bounds, window=5),
}
DENSE = ("lln", "diag", "block", "causal", "keys", "pages", "window")
# Those that know no α and β.
SOFTMAX = ("block", "pages", "window", "window_varlen")
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def at_night(*names):
    """Every function; compiling takes long, and these are compiled at night only."""
    return pytest.mark.parametrize(
        "name",
        [pytest.param(name, marks=[pytest.mark.slow] * (name in names)) for name in FUNCTIONS],
    )


PACKED = ("causal_varlen", "diag_varlen", "keys_varlen", "window_varlen")


def arguments(name, tokens=90, dtype=torch.float32, requires_grad=False, seed=0):
    """q, k, v of the layout that the function takes, and cu_seqlens if it takes them."""
    tensors = make_qkv(2, 2, tokens, D, dtype=dtype, seed=seed)
    if name in DENSE:
        return [tensor.requires_grad_(requires_grad) for tensor in tensors]
    packed = [tensor[0].transpose(0, 1).contiguous() for tensor in tensors]
    return [tensor.requires_grad_(requires_grad) for tensor in packed] + [cu_seqlens(tokens)]


def value_and_gradients(attend, args):
    out = attend(*args)
    leaves = [tensor for tensor in args if tensor.requires_grad]
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def close(found, expected, tolerance=2e-5):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def run_fresh(script, seconds=100):
    """Run a script in a new interpreter; its last line must be ``fine``.

    ``seconds`` of the processor's time, which other processes do not use up.
    """
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_CPU, ({seconds}, {seconds}))\n"
    done = subprocess.run(
        [sys.executable, "-c", limit + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == "fine"


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


# torch.compile


# "diag" consists of "lln" and "block".
@at_night("lln", "block", *PACKED)
def test_compiles_as_one_graph_forward_and_backward(name, fresh_dynamo):
    attend = FUNCTIONS[name]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=False)
    args = arguments(name, requires_grad=True)
    close(value_and_gradients(compiled, args), value_and_gradients(attend, args))


@pytest.mark.slow
def test_compiles_with_every_size_dynamic(fresh_dynamo):
    attend = FUNCTIONS["lln"]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (90, 37):
        # Sizes of 1 are never dynamic: one sample and one head save half of the compiler's time.
        args = [t.requires_grad_() for t in make_qkv(1, 1, tokens, D, seed=tokens)]
        close(value_and_gradients(compiled, args), value_and_gradients(attend, args))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", ["diag", pytest.param("varlen", marks=pytest.mark.slow)])
def test_compiles_once_for_two_lengths(name, fresh_dynamo):
    attend = FUNCTIONS[name]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for tokens in (90, 103):
        args = arguments(name, tokens, seed=tokens)
        for tensor in args[:3]:
            torch._dynamo.mark_dynamic(tensor, 2 if name in DENSE else 0)
        close([compiled(*args)], [attend(*args)])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(("tokens", "dynamic"), [(96, False), (90, False), (96, True)])
def test_blocks_of_a_known_length_are_cut_without_gathering(tokens, dynamic, fresh_dynamo):
    """Where a trace holds for one length only, blocks are views of the tensors."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph.code)
        return graph

    def attend(*sides):
        return lln.lln_diag_attention(*sides, **FIXED, block_size=16, impl="eager")

    args = make_qkv(1, 1, tokens, D)
    out = torch.compile(attend, fullgraph=True, backend=keep, dynamic=dynamic)(*args)
    close([out], [attend(*args)])
    assert ("arange" in graphs[0]) == (dynamic or tokens % 16 > 0)


@pytest.mark.slow
def test_compiles_exact_keys_once_for_two_lengths(fresh_dynamo):
    def attend(q, k, v):
        return lln.lln_keys_attention(q, k, v, **FIXED, offset=-2.0, **KEYS)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for tokens in (90, 103):
        args = make_qkv(1, 1, tokens, D, seed=tokens)
        for tensor in args:
            torch._dynamo.mark_dynamic(tensor, 2)
        close([compiled(*args)], [attend(*args)])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_compiles_causal_for_two_lengths_in_reasonable_time():
    """In its own process: symbolic lengths that do not simplify keep the compiler busy forever."""
    run_fresh(
        """
        import torch, lln
        attend = lambda q, k, v: lln.lln_attention(q, k, v, alpha=1.5, beta=1.2, is_causal=True)
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        for tokens in (90, 103):
            args = torch.randn(3, 2, 2, tokens, 8)
            for tensor in (args := [part.clone() for part in args]):
                torch._dynamo.mark_dynamic(tensor, 2)
            torch.testing.assert_close(compiled(*args), attend(*args), rtol=2e-5, atol=2e-5)
        print("fine")
        """,
        seconds=120,
    )


@pytest.mark.slow
def test_first_call_ever_may_be_compiled_by_inductor():
    run_fresh(
        """
        import torch, lln
        args = [t.requires_grad_() for t in torch.randn(3, 2, 2, 50, 8).unbind()]
        compiled = torch.compile(lln.lln_attention, fullgraph=True)
        found = torch.autograd.grad(compiled(*args).square().sum(), args)
        expected = torch.autograd.grad(lln.lln_attention(*args).square().sum(), args)
        for one, other in zip(found, expected):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        print("fine")
        """
    )


@pytest.mark.slow
def test_first_call_ever_may_be_compiled_packed():
    run_fresh(
        """
        import torch, lln
        args = [*torch.randn(3, 50, 2, 8), torch.tensor([0, 20, 50])]
        compiled = torch.compile(
            lln.lln_diag_attention_varlen, fullgraph=True, backend="aot_eager"
        )
        found = compiled(*args)
        torch.testing.assert_close(found, lln.lln_diag_attention_varlen(*args))
        print("fine")
        """
    )


def test_compiled_dispatch_accepts_masks_temperatures_and_gates(fresh_dynamo):
    q, k, v = make_qkv(2, 2, 40, D)
    options = {
        "alpha": torch.rand(2, 2, 1, 1) + 1,
        "beta": torch.rand(2, 1, 1) + 1,
        "mix": torch.rand(2, 2, 40, 1),
        "key_mask": torch.arange(40).expand(2, -1) < torch.tensor([[40], [25]]),
    }
    compiled = torch.compile(lln.lln_diag_attention, fullgraph=True, backend="aot_eager")
    close([compiled(q, k, v, **options)], [lln.lln_diag_attention(q, k, v, **options)])


# torch.export


class Wrapped(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, q, k, v):
        return FUNCTIONS[self.name](q, k, v)


class WrappedPacked(Wrapped):
    def forward(self, q, k, v, bounds):
        return FUNCTIONS[self.name](q, k, v, bounds)


def export(name, tokens, **options):
    module = Wrapped(name) if name in DENSE else WrappedPacked(name)
    return torch.export.export(module, tuple(arguments(name, tokens)), **options).module()


@at_night(*PACKED)
def test_exports(name):
    exported = export(name, 50)
    args = arguments(name, 50, seed=1)
    close([exported(*args)], [FUNCTIONS[name](*args)])


@pytest.mark.parametrize("name", [pytest.param("varlen", marks=pytest.mark.slow), "diag_varlen"])
def test_exports_packed_with_a_dynamic_length(name):
    shapes = ({0: torch.export.Dim.DYNAMIC},) * 3 + ({},)
    # Long enough that no count of blocks is 1, which the exporter would take for a constant.
    exported = export(name, 300, dynamic_shapes=shapes)
    for tokens in (190, 256, 700):
        args = arguments(name, tokens, seed=1)
        close([exported(*args)], [FUNCTIONS[name](*args)])


@pytest.mark.parametrize("group", [BLOCK, pytest.param(1, marks=pytest.mark.slow)])
def test_exports_exact_keys_with_a_dynamic_length(group):
    options = {**KEYS, "group_size": group}

    class Keys(nn.Module):
        def forward(self, q, k, v):
            return lln.lln_keys_attention(q, k, v, **options)

    shapes = ({2: torch.export.Dim.DYNAMIC},) * 3
    exported = torch.export.export(Keys(), make_qkv(1, 1, 300, D), dynamic_shapes=shapes).module()
    for tokens in (190, 256, 480):
        args = make_qkv(1, 1, tokens, D, seed=1)
        close([exported(*args)], [Keys()(*args)])


class Masked(nn.Module):
    """A layer with a mask that hides the first two tokens, if asked for."""

    def __init__(self, kind, masked):
        super().__init__()
        self.layer, self.masked = kind(4 * D, 4, batch_first=True), masked

    def forward(self, x):
        mask = None
        if self.masked:
            mask = (torch.arange(x.shape[1]) < 2).expand(x.shape[0], -1)
        return self.layer(x, x, x, key_padding_mask=mask)[0]


@pytest.mark.parametrize(
    ("kind", "masked"),
    [
        (lln.LLNAttention, False),
        (lln.LLNDiagAttention, True),
        (lln.LLNKeysAttention, True),
        (lln.WindowAttention, True),
        pytest.param(lln.LLNAttention, True, marks=pytest.mark.slow),
        pytest.param(lln.LLNDiagAttention, False, marks=pytest.mark.slow),
        pytest.param(lln.LLNKeysAttention, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("tokens", [3, pytest.param(5 * D, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "length",
    [torch.export.Dim("length"), pytest.param(torch.export.Dim.AUTO, marks=pytest.mark.slow)],
    ids=str,
)
def test_exported_layers_take_every_length(kind, masked, tokens, length):
    """On both sides of the block size, D or 64, whatever the length they were exported with."""
    torch.manual_seed(0)
    layer = Masked(kind, masked).eval()
    example = torch.randn(2, tokens, 4 * D)
    exported = torch.export.export(layer, (example,), dynamic_shapes=({1: length},)).module()
    for other in (1, 2, D - 1, D, D + 1, 64, 65, 130):
        x = torch.randn(2, other, 4 * D)
        close([exported(x)], [layer(x)])


def test_compiled_choice_has_as_many_groups(fresh_dynamo):
    query, key, _ = make_qkv(1, 1, 10, D)
    options = {"block_size": 16, "group_size": 8}
    compiled = torch.compile(lln.choose_keys, fullgraph=True, dynamic=True, backend="eager")
    expected = lln.choose_keys(query, key, 3, **options)
    assert torch.equal(compiled(query, key, 3, **options), expected)


@pytest.mark.slow
def test_exports_causal_with_a_dynamic_length():
    """In its own process, as the compiled one above."""
    run_fresh(
        """
        import torch, lln

        class Causal(torch.nn.Module):
            def forward(self, q, k, v):
                return lln.lln_attention(q, k, v, alpha=1.5, beta=1.2, is_causal=True)

        shapes = ({2: torch.export.Dim.DYNAMIC},) * 3
        exported = torch.export.export(
            Causal(), tuple(torch.randn(3, 2, 2, 300, 8)), dynamic_shapes=shapes
        ).module()
        for tokens in (190, 256, 700):
            args = torch.randn(3, 2, 2, tokens, 8).unbind()
            torch.testing.assert_close(exported(*args), Causal()(*args), rtol=2e-5, atol=2e-5)
        print("fine")
        """,
        seconds=60,
    )


# torch.func


@every_function
def test_func_grad(name):
    attend = FUNCTIONS[name]
    args = arguments(name, 20, torch.float64, requires_grad=True)
    expected = torch.autograd.grad(attend(*args).square().sum(), args[:3])
    plain = [tensor.detach() for tensor in args]
    found = torch.func.grad(lambda *a: attend(*a).square().sum(), argnums=(0, 1, 2))(*plain)
    close(found, expected, 1e-10)


@every_function
def test_func_vjp_and_jvp_agree_with_differences(name):
    q, *others = arguments(name, 70, torch.float64)
    weight, direction = torch.randn(2, *FUNCTIONS[name](q, *others).shape, dtype=torch.float64)

    def attend(query):
        # α and β of the inputs are detached, so only fixed ones have a derivative to compare with.
        options = {} if name in SOFTMAX else FIXED
        return FIXED_FUNCTIONS[name](query, *others, **options)

    _, pullback = torch.func.vjp(attend, q)
    _, tangent = torch.func.jvp(attend, (q,), (direction,))
    step = 1e-6
    difference = (attend(q + step * direction) - attend(q - step * direction)) / (2 * step)
    close([tangent], [difference], 1e-7)
    close([(pullback(weight)[0] * direction).sum()], [(weight * tangent).sum()], 1e-10)


@every_function
def test_forward_mode_without_a_transform(name):
    q, *others = arguments(name, 70, torch.float64)
    options = {} if name in SOFTMAX else FIXED
    direction = torch.randn_like(q)

    def attend(query):
        return FIXED_FUNCTIONS[name](query, *others, **options)

    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(attend(forward_ad.make_dual(q, direction))).tangent
    close([tangent], [torch.func.jvp(attend, (q,), (direction,))[1]], 1e-10)


@every_function
def test_batched_gradients(name):
    args = arguments(name, 70, torch.float64, requires_grad=True)
    out = FUNCTIONS[name](*args)
    weights = torch.randn(3, *out.shape, dtype=torch.float64)
    options = {"retain_graph": True}
    found = torch.autograd.grad(out, args[:3], weights, is_grads_batched=True, **options)
    single = [torch.autograd.grad(out, args[:3], weight, **options) for weight in weights]
    close(found, [torch.stack(parts) for parts in zip(*single, strict=True)], 1e-10)


FIXED_FUNCTIONS = {
    "lln": lln.lln_attention,
    "diag": lambda *a, **o: lln.lln_diag_attention(*a, block_size=BLOCK, **o),
    "block": lambda *a, **o: lln.block_diagonal_attention(*a, block_size=BLOCK, **o),
    "causal": lambda *a, **o: lln.lln_attention(*a, is_causal=True, **o),
    "varlen": lln.lln_attention_varlen,
    "diag_varlen": lln.lln_diag_attention_varlen,
    "causal_varlen": lambda *a, **o: lln.lln_attention_varlen(*a, is_causal=True, **o),
    "keys": lambda *a, **o: lln.lln_keys_attention(*a, offset=-2.0, group_size=1, **KEYS, **o),
    "keys_varlen": lambda *a, **o: lln.lln_keys_attention_varlen(*a, offset=-2.0, **KEYS, **o),
    "pages": FUNCTIONS["pages"],
    "window": FUNCTIONS["window"],
    "window_varlen": FUNCTIONS["window_varlen"],
}


@every_function
def test_func_vmap(name):
    attend = FUNCTIONS[name]
    runs = [arguments(name, 70, torch.float64, seed=seed) for seed in range(3)]
    expected = torch.stack([attend(*args) for args in runs])
    stacked = [torch.stack(parts) for parts in list(zip(*runs, strict=True))[:3]]
    in_dims = (0, 0, 0) if name in DENSE else (0, 0, 0, None)
    found = torch.func.vmap(attend, in_dims)(*stacked, *runs[0][3:])
    close([found], [expected], 1e-10)


def test_func_per_sample_gradients():
    q, k, v = make_qkv(4, 2, 12, D, dtype=torch.float64)

    def loss(query, key, value):
        return lln.lln_diag_attention(query[None], key[None], value[None]).square().sum()

    found = torch.func.vmap(torch.func.grad(loss))(q, k, v)
    q.requires_grad_()
    expected = torch.autograd.grad(lln.lln_diag_attention(q, k, v).square().sum(), q)[0]
    close([found], [expected], 1e-10)


# Precision


def reference_of(name, args):
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in args]
    return FIXED_FUNCTIONS[name](*wide, **({} if name in SOFTMAX else FIXED))


@every_function
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_inputs_are_accumulated_in_float32(name, dtype):
    args = arguments(name, dtype=dtype)
    found = FIXED_FUNCTIONS[name](*args, **({} if name in SOFTMAX else FIXED))
    assert found.dtype == dtype
    assert_close(found, reference_of(name, args))


@every_function
@pytest.mark.parametrize("mixed", [False, True])
def test_autocast(name, mixed):
    args = arguments(name)
    if mixed:
        args[1] = args[1].bfloat16()
    rounded = [t.bfloat16() if t.is_floating_point() else t for t in args]
    with torch.autocast("cpu", torch.bfloat16):
        found = FIXED_FUNCTIONS[name](*args, **({} if name in SOFTMAX else FIXED))
        like = F.scaled_dot_product_attention(*torch.randn(3, 1, 1, 4, 8))
    assert found.dtype == like.dtype == torch.bfloat16
    assert_close(found, reference_of(name, rounded))


@every_function
def test_autocast_leaves_float64_alone(name):
    args = arguments(name, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        found = FUNCTIONS[name](*args)
    assert torch.equal(found, FUNCTIONS[name](*args))


@every_function
def test_autocast_matches_moments_in_float32(name):
    """The same rounded inputs give the same numbers inside autocast and outside."""
    args = arguments(name, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = FUNCTIONS[name](*args)
    assert torch.equal(found, FUNCTIONS[name](*args))


@every_function
def test_autocast_gradients_have_the_dtype_of_the_inputs(name):
    args = arguments(name, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = FUNCTIONS[name](*args)
    out.float().square().sum().backward()
    assert all(t.grad.dtype == torch.float32 and t.grad.isfinite().all() for t in args[:3])


# Checkpointing and determinism


@every_function
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(name, reentrant):
    attend = FUNCTIONS[name]
    args = arguments(name, requires_grad=True)
    expected = value_and_gradients(attend, args)
    # The first forward of a reentrant checkpoint has no gradient, and may go another way.
    with torch.set_grad_enabled(not reentrant):
        first = attend(*args)
    out = checkpoint(attend, *args, use_reentrant=reentrant)
    # So that the gradients are those of the same numbers, also if the output differs in rounding.
    torch.autograd.backward(out, 2 * expected[0].detach())
    assert torch.equal(out, first)
    if name.startswith("keys"):
        torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-6)
    else:
        # The others have one way.
        assert torch.equal(out, expected[0])
    assert all(torch.equal(t.grad, g) for t, g in zip(args[:3], expected[1:], strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_repeats_dropout(reentrant):
    def attend(q, k, v):
        return lln.lln_diag_attention(q, k, v, block_size=BLOCK, dropout_p=0.5)

    args = arguments("diag", requires_grad=True)
    torch.manual_seed(0)
    expected = value_and_gradients(attend, args)
    torch.manual_seed(0)
    checkpoint(attend, *args, use_reentrant=reentrant).square().sum().backward()
    assert all(torch.equal(t.grad, g) for t, g in zip(args, expected[1:], strict=True))


@every_function
def test_deterministic_algorithms(name):
    before = torch.are_deterministic_algorithms_enabled()
    args = arguments(name, requires_grad=True)
    expected = value_and_gradients(FUNCTIONS[name], args)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(5):
            found = value_and_gradients(FUNCTIONS[name], args)
            assert all(map(torch.equal, found, expected))
    finally:
        torch.use_deterministic_algorithms(before)


# Fake and meta tensors


@every_function
def test_meta_tensors_forward_and_backward(name):
    args = [tensor.to("meta") for tensor in arguments(name)]
    for tensor in args[:3]:
        tensor.requires_grad_()
    out, *gradients = value_and_gradients(FUNCTIONS[name], args)
    assert out.is_meta
    assert out.shape == FUNCTIONS[name](*arguments(name)).shape
    assert [g.shape for g in gradients] == [t.shape for t in args[:3]]


@every_function
def test_fake_tensors(name):
    expected = FUNCTIONS[name](*arguments(name))
    real = arguments(name)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in real]
        found = FUNCTIONS[name](*fakes)
    for what in ("shape", "dtype", "device"):
        assert getattr(found, what) == getattr(expected, what)


def test_fake_temperatures():
    q, k, v = arguments("lln")
    with FakeTensorMode() as mode:
        scale = mode.from_tensor(torch.ones(2, 2, 1, 1))
        fakes = [mode.from_tensor(tensor) for tensor in (q, k, v)]
        assert lln.lln_attention(*fakes, alpha=scale, beta=scale).shape == q.shape
