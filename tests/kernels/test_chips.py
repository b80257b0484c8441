"""Every kind of call fits chips that are not here: the kernels are compiled for them, not run."""

import contextlib
import os
import re
import types
import warnings

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources

import lln
from lln.functional import kernel_ways, prepared_calls
from lln.kernels.keys import keys_ops
from lln.kernels.launching import limits, plain_launches, recipes, sizes

# Name → compute capability, and the shared memory that a program can have.
CHIPS = {"A100": (80, 166_912), "RTX 3090": (86, 101_376)}
HOPPER = {"H100": (90, 232_448)}
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
GIVEN = {"alpha": 2.0, "beta": 2.0}


@pytest.fixture
def plug_in(monkeypatch):
    """Put a chip in the place of the CPU: launches compile, and need no more than it has."""

    def plug(name):
        capability, shared = (CHIPS | HOPPER)[name]

        class Driver:
            # Another device for every chip: Triton keeps what it compiled by device.
            get_current_device = staticmethod(lambda: capability)
            get_current_stream = staticmethod(lambda device: 0)
            get_current_target = staticmethod(lambda: GPUTarget("cuda", capability, 32))

        def record(step, live):
            compiled = step.kernel.warmup(*step._filled(live), grid=step.grid, **step.how)
            if compiled.metadata.shared > shared:
                raise OutOfResources(compiled.metadata.shared, shared, "shared memory")
            needs.append((step.kernel.fn.__name__, compiled.metadata.shared))
            step.runner = step.launch = lambda *arguments: None

        needs = []
        monkeypatch.setattr(driver, "_active", Driver())
        monkeypatch.setattr(recipes.Step, "record", record)
        monkeypatch.setattr(recipes, "on_device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(recipes, "_recipes", {})
        monkeypatch.setattr(recipes, "_shrunk", {})
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
        monkeypatch.setattr(limits, "_known", {("cpu", None): shared})
        prepared_calls.clear()
        monkeypatch.setattr(sizes, "multiprocessors", lambda device: 82)
        monkeypatch.setattr(kernel_ways, "why_no_kernels", lambda query: None)
        monkeypatch.setattr(kernel_ways.KernelWay, "pays", lambda way, call: True)
        return needs

    sizes._choose.cache_clear()
    yield plug
    sizes._choose.cache_clear()


def fit_keys(dtype, width, block_size=64, keys=64):
    """Forward and backward of one call with exact keys."""
    inputs = [torch.randn(2, 3, 300, width, dtype=dtype).requires_grad_() for _ in range(3)]
    numbers = GIVEN | {"offset": 0.0, "block_size": block_size, "keys": keys}
    mask = torch.rand(2, 300) > 0.5
    out = lln.lln_keys_attention(*inputs, **numbers, key_mask=mask, impl="triton")
    torch.autograd.grad(out, inputs, torch.ones_like(out))


def fit_rank(dtype, width, masked):
    """What a rank of several computes with exact keys: 300 tokens, and 70 rows behind them."""
    query = torch.randn(2, 4, 300, width, dtype=dtype).requires_grad_()
    key, value = (torch.randn(2, 2, 370, width, dtype=dtype).requires_grad_() for _ in range(2))
    mask = torch.rand(2, 300) > 0.5 if masked else None
    gaps = torch.tensor([0, 5]) if masked else None
    sizes = {"block_size": 64, "group_size": 32}
    mean = keys_ops.fused_means(query, mask, gaps, blocks=5, flip=False, **sizes)
    keys_ops.fused_candidates(mean, key[:, :, :300], mask, gaps, 64, **sizes)
    slots = [torch.randn(2, 2, width, *shape).requires_grad_() for shape in ((), (width,), ())]
    indices = torch.randint(300, 370, (2, 4, 10, 64))
    numbers = {"held": torch.tensor([900, 900]) if masked else 900, "key_mask": mask, **sizes}
    out = keys_ops.fused_sharded_keys(
        query, key, value, 2.0, 0.0, slots, indices, scale=None, **numbers
    )
    torch.autograd.grad(out, (query, key, value, *slots), torch.ones_like(out))


each_size_of_keys = pytest.mark.parametrize(
    ("chip", "dtype", "width"),
    [
        ("RTX 3090", BFLOAT16, 64),
        ("RTX 3090", FLOAT32, 32),
        ("A100", BFLOAT16, 128),
        ("A100", FLOAT32, 64),
    ],
)


@pytest.mark.slow
@each_size_of_keys
def test_exact_keys_fit(plug_in, chip, dtype, width):
    needs = plug_in(chip)
    fit_keys(dtype, width)
    assert len(needs) >= 8
    assert max(shared for _, shared in needs) <= CHIPS[chip][1]


@pytest.mark.slow
@each_size_of_keys
@pytest.mark.parametrize("masked", [False, True])
def test_exact_keys_of_a_rank_fit(plug_in, chip, dtype, width, masked):
    needs = plug_in(chip)
    fit_rank(dtype, width, masked)
    assert len(needs) >= 10
    assert max(shared for _, shared in needs) <= CHIPS[chip][1]


def fit(dtype, width, value_width=None, block_size=None, learnt_mix=False, **options):
    """Forward and backward of one call; raises where no sizes fit."""
    batch, heads, tokens = 2, 3, 300
    query, key = torch.randn(2, batch, heads, tokens, width, dtype=dtype).unbind()
    value = torch.randn(batch, heads, tokens, value_width or width, dtype=dtype)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    if block_size is None:
        out = lln.lln_attention(*inputs, **GIVEN, **options)
    elif options.pop("alone", False):
        out = lln.block_diagonal_attention(*inputs, block_size=block_size)
    else:
        mix = torch.full((batch, heads, tokens, 1), 0.5, requires_grad=True) if learnt_mix else 0.5
        if options.pop("mask", False):
            options["key_mask"] = torch.rand(batch, tokens) > 0.5
        out = lln.lln_diag_attention(*inputs, **GIVEN, block_size=block_size, mix=mix, **options)
    torch.autograd.grad(out, inputs, torch.ones_like(out))


@pytest.mark.parametrize(
    ("chip", "call"),
    [
        ("RTX 3090", {"dtype": BFLOAT16, "width": 64, "block_size": 64}),
        ("RTX 3090", {"dtype": BFLOAT16, "width": 128}),
        ("RTX 3090", {"dtype": FLOAT32, "width": 64, "block_size": 64}),
        ("RTX 3090", {"dtype": BFLOAT16, "width": 128, "block_size": 64, "mask": True}),
        ("A100", {"dtype": BFLOAT16, "width": 64, "block_size": 128}),
    ],
    ids=str,
)
def test_usual_calls_fit(plug_in, chip, call):
    needs = plug_in(chip)
    fit(**call)
    own = call["width"] > 64
    expected = {"summarise_slots_kernel" if own else "summarise_kernel", "read_kernel"}
    expected.add("key_slot_major_kernel" if own else "key_bwd_kernel")
    assert {name for name, _ in needs} >= expected
    assert 0 < max(shared for _, shared in needs) <= CHIPS[chip][1]


# Half types to 256 channels, diagonal blocks to the longest that the kernels take, and beyond.
MANY = [
    {"dtype": dtype, "width": width, **extra}
    for dtype in (BFLOAT16, FLOAT32)
    for width in (32, 64, 128, 256)
    for extra in (
        {},
        {"value_width": 256},
        {"is_causal": True},
        {"block_size": 64},
        {"block_size": 128},
        {"block_size": 64, "learnt_mix": True},
        {"block_size": 64, "value_width": 256},
        {"block_size": 64, "is_causal": True},
        {"block_size": 64, "mask": True},
        {"block_size": 64, "is_causal": True, "mask": True},
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("call", MANY, ids=str)
def test_all_calls_fit(plug_in, chip, call):
    plug_in(chip)
    fit(**call)


@pytest.mark.parametrize(
    ("chip", "width"),
    [
        ("RTX 3090", 64),
        *(pytest.param(chip, 256, marks=pytest.mark.slow) for chip in CHIPS),
    ],
)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("options", [{}, {"window": 256}, {"is_causal": True}], ids=str)
def test_windows_fit(plug_in, chip, dtype, width, options):
    needs = plug_in(chip)
    inputs = torch.randn(3, 1, 1, 300, width, dtype=dtype).requires_grad_().unbind()
    out = lln.window_attention(*inputs, **({"window": 64} | options))
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    expected = {"window_fwd_kernel", "window_query_kernel", "window_key_kernel"}
    assert {name for name, _ in needs} >= expected
    assert 0 < max(shared for _, shared in needs) <= CHIPS[chip][1]


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("width", [32, 64, 128, 256])
@pytest.mark.parametrize("block_size", [16, 64, 128, 256])
def test_blocks_alone_fit(plug_in, chip, dtype, width, block_size):
    plug_in(chip)
    query = torch.empty(1, width, dtype=dtype)
    if not limits.blocks_fit(query, block_size, False, extras=False) and dtype == FLOAT32:
        with pytest.raises(lln.BackendUnavailableError, match="no tile for blocks"):
            lln.block_diagonal_attention(
                *torch.randn(3, 1, 1, 300, width, dtype=dtype), block_size=block_size, impl="triton"
            )
        return
    fit(dtype, width, block_size=block_size, alone=True)


def test_a_chip_with_less_room_runs_plain_pytorch(monkeypatch):
    monkeypatch.setattr(limits, "_known", {("cpu", None): 65_536})
    query = torch.empty(1, 1, 1, 8)
    monkeypatch.setattr(limits, "is_interpreted", lambda: True)
    assert limits.why_unavailable(query) == "needs a GPU with 99 KB of shared memory for a program"


@pytest.mark.parametrize(
    ("shared", "chip"), [(232_448, 0), (166_912, 1), (101_376, 2), (98_304, None)]
)
def test_devices_find_their_limits(monkeypatch, shared, chip):
    class Properties:
        shared_memory_per_block_optin = shared

    monkeypatch.setattr(limits, "_known", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties())
    expected = None if chip is None else limits.CHIPS[chip]
    assert limits.chip_of(torch.device("cuda", 1)) == expected


def test_compilers_take_the_answer_and_not_the_question(monkeypatch):
    def untraceable(index):
        warnings.warn("asked", stacklevel=1)
        return types.SimpleNamespace(shared_memory_per_block_optin=[101_376][index])

    def scaled(x):
        return x * limits.chip_of(torch.device("cuda", 0)).summary

    cuda = types.SimpleNamespace(
        is_available=lambda: True, get_device_properties=torch.compiler.disable(untraceable)
    )
    monkeypatch.setattr(limits, "_known", {})
    monkeypatch.setattr(limits, "torch", types.SimpleNamespace(cuda=cuda))
    with pytest.warns(UserWarning, match="asked"):
        compiled = torch.compile(scaled, fullgraph=True, backend="eager")(torch.ones(2))
    assert compiled.tolist() == [limits.SMALL.summary] * 2


@pytest.mark.parametrize("chip", ["H100", "A100"])
def test_later_launches_wait_before_they_touch_memory(plug_in, monkeypatch, chip):
    plug_in(chip)
    seen = []

    def record(step, live):
        compiled = step.kernel.warmup(*step._filled(live), grid=step.grid, **step.how)
        seen.append((step, compiled.metadata.launch_pdl, compiled.asm["ptx"]))
        step.runner = step.launch = lambda *arguments: None

    monkeypatch.setattr(recipes.Step, "record", record)
    lln.lln_attention(*torch.randn(3, 1, 2, 300, 64, dtype=BFLOAT16).unbind())
    assert len(seen) == 5
    names = [step.kernel.fn.__name__ for step, _, _ in seen]
    for name, (step, is_early, ptx) in zip(names, seen, strict=True):
        # Each of the two recipes, moments and attention, begins after all that was launched.
        waits = chip == "H100" and name not in ("measure_kernel", "summarise_kernel")
        assert step.follows == bool(is_early) == waits
        assert ptx.count("griddepcontrol") == waits
        if waits:
            touched = re.search(r"^.*\b(ld|st|cp|red|atom|prefetch)\S*\.global", ptx, re.M)
            assert touched is not None
            assert ptx.index("griddepcontrol.wait") < touched.start()


def parameters_in(ptx):
    """The sizes of the parameters of a compiled kernel, as the driver will see them."""
    (entry,) = re.findall(r"\.entry \w+\(([^)]*)\)", ptx)
    return [int(bits) // 8 for bits in re.findall(r"\.param \.[a-z]+(\d+)", entry)]


@pytest.mark.parametrize("options", [{}, {"block_size": 16, "mix": 0.3}], ids=["lln", "blocks"])
def test_launches_have_the_parameters_of_the_kernels(plug_in, monkeypatch, options):
    """`plain_launches` passes what Triton has compiled, with scratch pointers."""
    plug_in("A100")
    kernels = []

    def record(step, live):
        given = step._filled(live)
        step.compiled = step.kernel.warmup(*given, grid=step.grid, **step.how)
        step.compiled.function = len(kernels)
        kernels.append(step.compiled)
        step.runner = step.launch = lambda *arguments: None

    monkeypatch.setattr(recipes.Step, "record", record)
    inputs = torch.randn(3, 1, 2, 40, 16, dtype=BFLOAT16).unbind()
    attend = lln.lln_diag_attention if options else lln.lln_attention
    attend(*inputs, **GIVEN, **options)
    (recipe,) = recipes._recipes.values()
    asked = []

    def sizes_of(function):
        asked.append(parameters_in(kernels[function].asm["ptx"]))
        return asked[-1]

    plain = plain_launches.describe(recipe, recipe.names, sizes_of)
    assert plain is not None
    for found, (_, _, threads, shared, _, cells, fills), kernel in zip(
        asked, plain[2], kernels, strict=True
    ):
        assert len(cells) == 8 * len(found)
        assert (threads, shared) == (32 * kernel.metadata.num_warps, kernel.metadata.shared)
        for cell, slot, form in fills:
            is_number = form == "f" or slot == recipe.names.index("seed")
            assert found[cell] == (4 if is_number else 8)
