"""The compiled launcher gives the bits that Python gives, and leaves to Python what is unusual."""

import collections
import contextlib
import types
from pathlib import Path

import pytest
import torch
from tests.kernels.common import DEVICE, HALF, ON_GPU, let_auto_take_kernels
from tests.kernels.launching.launcher_driver import FakeDriver, built, hooked
from tests.kernels.lln.test_repeats import (
    CALLS,
    NUMBERS,
    inputs_of,
    kept_inputs,
    outcome,
    outcome_of_parts,
    scales,
    with_options,
)
from torch.utils.checkpoint import checkpoint

import lln
from lln import observers
from lln.checks.call import FIELDS, Call
from lln.cli import launcher_build
from lln.functional import prepared_calls
from lln.functional.way import Way
from lln.kernels.launching import compiled_launcher, recipes
from lln.kernels.launching.recipes import Step
from lln.kernels.launching.sizes import overrides
from lln.kernels.lln import repeats

fake_only = pytest.mark.skipif(ON_GPU, reason="needs the driver made of Python")
LONG = 2100 if ON_GPU else 150


@pytest.fixture(scope="session")
def library():
    # Shared by all workers and by later runs: the file is named for all that it is made of.
    folder = Path(__file__).parents[3] / "build" / "launcher"
    folder.mkdir(parents=True, exist_ok=True)
    return built(folder)


@pytest.fixture(scope="session")
def module(library):
    return compiled_launcher.open_library(library)


class Ways:
    """How calls went: how many took the long way, how many backward passes went to Python."""

    def __init__(self, module, driver):
        self.module, self.driver = module, driver
        self.calls, self.by_python, self.backwards = [], [], []
        self.runtime = types.SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)

    def count(self):
        return len(self.calls), len(self.by_python), len(self.backwards)


@pytest.fixture
def ways(module, monkeypatch):
    """The compiled launcher in use, with nothing known."""
    driver = None if ON_GPU else FakeDriver()
    ways = Ways(module, driver)
    monkeypatch.setattr(recipes, "_recipes", {})
    monkeypatch.setattr(repeats, "try_fast_path", None)
    monkeypatch.delenv("LLN_LAUNCHER", raising=False)
    watch(monkeypatch, Way, "run", ways.calls)
    watch(monkeypatch, repeats.Repeat, "run", ways.by_python)
    watch(monkeypatch, repeats, "differentiate_by_the_long_way", ways.backwards)
    monkeypatch.setattr(compiled_launcher, "_found", module)
    monkeypatch.setattr(compiled_launcher, "_refused", None)
    long_way = repeats.differentiate_by_the_long_way
    if driver is None:
        assert compiled_launcher._connect(module, long_way) is None
        ways.runtime = recipes.knobs.runtime
    else:
        record = Step.record

        def by_address(self, live):
            record(self, live)
            self.compiled = driver.enter(self, self._filled(live))
            # Launches of `Repeat` in Python: behind the grid, the stream and the code.
            self.runner, self.code = True, (None,) * 5
            self.launch = lambda *given: run_at(self, given[9:], driver)

        monkeypatch.setattr(Step, "record", by_address)
        monkeypatch.setattr(repeats, "_on_gpu", lambda tensor: True)
        monkeypatch.setattr(recipes, "current_stream", lambda device: 0)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
        let_auto_take_kernels(monkeypatch)
        compiled_launcher.connect(module, "cpu", driver.addresses, ways.runtime, long_way)
    yield ways
    module.forget()
    assert driver is None or not driver.faults


def run_at(step, arguments, driver):
    """A launch by addresses from Python, as in `tests.kernels.lln.test_repeats`."""
    from tests.kernels.launching.launcher_driver import at

    dtypes = next(kept[2] for kept in driver.steps.values() if kept[0] is step)
    pairs = zip(arguments, dtypes, strict=True)
    tensors = [one if kind is None else at(one, kind) for one, kind in pairs]
    step.kernel[step.grid](*tensors, num_warps=step.warps)


def watch(monkeypatch, owner, name, seen):
    """Count the calls of a function."""
    function = getattr(owner, name)

    def counted(*given):
        seen.append(name)
        return function(*given)

    monkeypatch.setattr(owner, name, counted)


def by_python(monkeypatch, attend, inputs, **how):
    """What Python alone gives, the long way."""
    with monkeypatch.context() as patch:
        patch.setattr(repeats, "try_fast_path", None)
        patch.setattr(prepared_calls, "_prepared", {})
        patch.setattr(compiled_launcher, "_found", "not now")
        return outcome(attend, inputs, **how)


def are_equal(found, expected):
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


QUICK = ("numbers", "blocks, matched")
CASES = [
    pytest.param(dtype, CALLS[name], id=f"{name}, {dtype}", marks=marks)
    for name in CALLS
    for dtype in (torch.float32, *HALF)
    for quick in [(name in QUICK and dtype == torch.float32) or (ON_GPU and dtype == HALF[-1])]
    for marks in [() if quick else pytest.mark.slow]
]


@pytest.mark.parametrize(("dtype", "options"), CASES)
def test_the_same_bits(dtype, options, ways, monkeypatch):
    attend = with_options(**options)
    found = [outcome(attend, inputs_of(seed, dtype=dtype)) for seed in (0, 1, 2)]
    # The first call was long; the second had to learn its backward pass; the third was free.
    assert ways.count() == (1, 0, 1)
    for seed, sides in enumerate(found):
        assert are_equal(sides, by_python(monkeypatch, attend, inputs_of(seed, dtype=dtype)))


WAYS = {
    "without gradient": {"requires_grad": False},
    "long": {"tokens": LONG},
    "long, without gradient": {"tokens": LONG, "requires_grad": False},
    "groups": {"key_heads": 2},
    "transposed": {"layout": "transposed"},
}


@pytest.mark.parametrize(
    ("how", "options"),
    [
        pytest.param(how, options, id=f"{name}, {len(options)}", marks=marks)
        for name, how in WAYS.items()
        for options in (NUMBERS, {}, {**NUMBERS, "block_size": 16})
        for quick in [
            (ON_GPU and "block_size" not in options) or (name == "without gradient" and not options)
        ]
        for marks in [() if quick else pytest.mark.slow]
    ],
)
def test_other_shapes(how, options, ways, monkeypatch):
    attend = with_options(**options)
    found = [outcome(attend, inputs_of(seed, **how)) for seed in (0, 1, 2)]
    # With groups and matched temperatures every query head has its β: not repeated this way.
    usual = "key_heads" not in how or "alpha" in options
    assert ways.count()[:2] == ((1, 0) if usual else (3, 0))
    assert are_equal(found[2], by_python(monkeypatch, attend, inputs_of(2, **how)))


def test_parts_of_one_projection(ways, monkeypatch):
    """Their gradients do not lie in memory as they do: nothing is between the rows."""
    attend = with_options()
    found = [outcome_of_parts(attend, seed) for seed in (0, 1, 2)]
    assert ways.count() == (1, 0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(repeats, "try_fast_path", None)
        patch.setattr(prepared_calls, "_prepared", {})
        patch.setattr(compiled_launcher, "_found", "not now")
        expected = outcome_of_parts(attend, 2)
    assert are_equal(found[2], expected)
    assert [side.stride() for side in found[2]] == [side.stride() for side in expected]


def test_numbers_are_those_of_the_call(ways, monkeypatch):
    inputs = inputs_of(0, requires_grad=False)
    for alpha, beta, mix in ((1.0, 1.0, 0.5), (2.0, 1.0, 0.5), (1.0, 2, 0.5), (1.0, 1.0, 0.9)):
        attend = with_options(alpha=alpha, beta=beta, mix=mix, block_size=16)
        (found,) = outcome(attend, inputs)
        (expected,) = by_python(monkeypatch, attend, inputs)
        assert torch.equal(found, expected)
    assert ways.module.known() == 1
    assert not ways.by_python


def test_a_part_needs_gradients(ways, monkeypatch):
    attend = with_options(**NUMBERS)
    for seed in (0, 1, 2):
        inputs = inputs_of(seed, requires_grad=False)
        inputs[1].requires_grad_()
        (found,) = torch.autograd.grad(attend(*inputs).sum(), inputs[1:2])
    assert ways.count() == (1, 0, 1)
    whole = by_python(monkeypatch, attend, inputs_of(2))
    torch.testing.assert_close(found, whole[2])


def test_gradients_that_lie_otherwise(ways):
    attend, inputs = with_options(**NUMBERS), inputs_of(0)
    attend(*inputs)
    out = attend(*inputs)
    one = torch.ones((), device=DEVICE, dtype=out.dtype).expand(out.shape)
    sent = (torch.ones_like(out), one, torch.ones(out.mT.shape, device=DEVICE).mT)
    found = [
        torch.autograd.grad(out, inputs, upstream, retain_graph=True) for upstream in (*sent, *sent)
    ]
    assert len(ways.backwards) == len(sent)
    for other in found[1:]:
        for side, expected in zip(other, found[0], strict=True):
            torch.testing.assert_close(side, expected)


def test_saved_tensors_that_come_back_otherwise(ways):
    attend, found = with_options(**NUMBERS), []
    for is_hooked in (False, False, False, True, True, False):
        inputs = inputs_of(0, layout="transposed")
        hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.Tensor.contiguous)
        with hooks if is_hooked else contextlib.nullcontext():
            out = attend(*inputs)
        sent = torch.ones(out.shape, device=DEVICE).transpose(1, 2).contiguous().transpose(1, 2)
        found.append(torch.autograd.grad(out, inputs, sent))
    assert len(ways.calls) == 1
    for other in found[1:]:
        for side, expected in zip(other, found[0], strict=True):
            torch.testing.assert_close(side, expected)


def test_changed_and_released_inputs_are_noticed(ways):
    attend, inputs = with_options(**NUMBERS), inputs_of(0)
    attend(*inputs)
    out = attend(*inputs)
    with torch.no_grad():
        inputs[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    out = attend(*inputs)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    assert not ways.by_python


def test_second_derivatives_are_refused(ways):
    attend, inputs = with_options(**NUMBERS), inputs_of(0)
    for _ in range(3):
        (first,) = torch.autograd.grad(attend(*inputs).sum(), inputs[:1], create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative; use impl='eager'"):
            first.sum().backward()
    assert ways.count() == (1, 0, 1)


def test_an_output_that_nobody_uses(ways):
    attend, inputs = with_options(**NUMBERS), inputs_of(0)
    attend(*inputs)
    out = attend(*inputs)
    node = out.grad_fn
    assert "LLNAttend" in node.name()
    assert node(None) == (None, None, None)


def test_checkpoints_repeat_either_way(ways):
    attend = with_options()
    for seed in (0, 1, 2):
        inputs = inputs_of(seed)
        out = checkpoint(attend, *inputs, use_reentrant=False)
        found = torch.autograd.grad(out, inputs, torch.ones_like(out))
        assert are_equal(found, outcome(attend, inputs)[1:])
    assert len(ways.calls) == 1


def test_what_is_unusual_goes_to_python(ways, monkeypatch):
    """The launcher is asked, and says None."""
    inputs, attend = inputs_of(0), with_options(**NUMBERS)
    attend(*inputs)
    attend(*inputs)
    assert ways.count() == (1, 0, 0)
    learned = scales(1, 2, 1, 1).requires_grad_()
    gate = torch.full((1, 2, 40, 1), 0.5, device=DEVICE)
    lln.lln_attention(*inputs, **NUMBERS, dropout_p=0.1, impl="triton")
    lln.lln_attention(*inputs, alpha=learned, beta=2.0, impl="triton")
    lln.lln_diag_attention(*inputs, **NUMBERS, mix=gate, block_size=16, impl="triton")
    lln.lln_attention(*inputs, matching="paper", impl="triton")
    lln.lln_attention(*inputs, **NUMBERS, impl="eager")
    assert ways.count() == (6, 0, 0)
    monkeypatch.setitem(overrides, "precision", "ieee")
    attend(*inputs)
    monkeypatch.delitem(overrides, "precision")
    assert ways.count() == (7, 0, 0)
    heard = []
    observers.add_observer(heard.append)
    attend(*inputs)
    observers.remove_observer(heard.append)
    assert (len(heard), *ways.count()) == (1, 8, 0, 0)


def test_modes_and_subclasses_go_to_python(ways):
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **kwargs or {})

    class Listening(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **kwargs or {})

    seen, inputs, attend = [], inputs_of(0, requires_grad=False), with_options(**NUMBERS)
    attend(*inputs)
    again = repeats.try_fast_path
    arguments = (Call("lln", *inputs, **NUMBERS), True, "triton")
    assert again(*arguments) is not None
    with Watching():
        assert again(*arguments) is None
        attend(*inputs)
    assert any("lln.attend" in name for name in seen)
    with Listening():
        assert again(*arguments) is None
    answers = []

    def ask(number):
        answers.append(again(*arguments))
        return number

    torch.func.vmap(ask)(torch.zeros(2))
    assert answers == [None]
    parameter = torch.nn.Parameter(inputs[0])
    assert again(arguments[0].replace(query=parameter), *arguments[1:]) is None


def test_words_and_numbers_that_python_refuses(ways):
    inputs = inputs_of(0, requires_grad=False)
    lln.lln_attention(*inputs, **NUMBERS, impl="triton")
    again = repeats.try_fast_path
    usual = Call("lln", *inputs, **NUMBERS)
    assert again(usual, True, "triton") is not None
    wrong = {"alpha": (0.0, -1, float("nan"), float("inf"), True, None)}
    wrong |= {"matching": ("varianz", 3), "mix": (-0.1, 1.1), "dropout_p": (0.1, True)}
    wrong |= {"is_causal": (0, None), "kind": ("diag", 0), "bounds": (torch.tensor([0, 5]),)}
    for name, values in wrong.items():
        for value in values:
            assert again(usual.replace(**{name: value}), True, "triton") is None, (name, value)
    assert again(usual, 1, "triton") is None
    for impl in ("cuda", "eager"):
        assert again(usual, True, impl) is None
    with pytest.raises(lln.InvalidInputError):
        lln.lln_attention(*inputs, alpha=-1.0, beta=1.0, impl="triton")
    with pytest.raises(lln.InvalidInputError):
        lln.lln_attention(*inputs, alpha=1.0, impl="triton")


def test_autocast_is_that_of_python(ways):
    inputs, attend = inputs_of(0, requires_grad=False), with_options(**NUMBERS)
    attend(*inputs)
    dtype = HALF[0]
    with torch.autocast(DEVICE, dtype=dtype):
        outs = [attend(*inputs) for _ in range(3)]
        narrow = [attend(*[side.to(dtype) for side in inputs]) for _ in range(2)]
    assert all(out.dtype == dtype for out in outs + narrow)
    assert all(torch.equal(out, outs[0]) for out in outs + narrow)
    # One long call outside, one inside.
    assert ways.count() == (2, 0, 0)


def test_launch_hooks_are_called(ways):
    inputs, attend, heard = inputs_of(0), with_options(**NUMBERS), []
    for _ in range(3):
        outcome(attend, inputs)
    out = attend(*inputs)
    arguments = (Call("lln", *inputs, **NUMBERS), True, "triton")
    assert repeats.try_fast_path(*arguments) is not None
    before = len(ways.backwards)
    with hooked(ways.runtime, heard.append):
        assert repeats.try_fast_path(*arguments) is None
        out.sum().backward()
    assert len(ways.backwards) == before + 1
    chain = types.SimpleNamespace(calls=[])
    with hooked(ways.runtime, chain):
        assert repeats.try_fast_path(*arguments) is not None
        chain.calls.append(heard.append)
        assert repeats.try_fast_path(*arguments) is None


def test_compiled_calls_never_ask(ways):
    inputs, attend = inputs_of(0), with_options(**NUMBERS)
    outcome(attend, inputs)
    expected = outcome(attend, inputs)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert are_equal(outcome(compiled, inputs), expected)


def test_no_tensor_is_kept(ways):
    assert not kept_inputs(3)


@fake_only
def test_a_launch_that_fails_is_an_error(ways):
    inputs, attend = inputs_of(0, requires_grad=False), with_options(**NUMBERS)
    attend(*inputs)
    ways.driver.status = 719
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx failed with error 719"):
        attend(*inputs)


@fake_only
def test_followers_are_launched_as_such(ways, monkeypatch):
    """The driver checks it: `FakeDriver` compares what it is told with the steps."""
    monkeypatch.setattr(recipes, "can_follow", lambda: True)
    monkeypatch.setattr(Step, "follow", lambda step: setattr(step, "follows", True))
    attend, inputs = with_options(**NUMBERS), inputs_of(0, requires_grad=False)
    attend(*inputs)
    attend(*inputs)
    told = [step.follows for step, *_ in ways.driver.steps.values()]
    assert told[0] is False
    assert all(told[1:])
    assert len(ways.driver.seen) == len(told) > 1


@fake_only
@pytest.mark.parametrize(
    "strange",
    [
        {"global_scratch_size": 64},
        {"profile_scratch_size": 8},
        {"num_ctas": 2},
        {"cluster_dims": (2, 1, 1)},
        {"launch_cooperative_grid": True},
        {"tensordesc_meta": [{}]},
        {"target": types.SimpleNamespace(backend="hip", warp_size=64)},
    ],
    ids=lambda strange: next(iter(strange)),
)
def test_kernels_that_need_more_stay_with_triton(ways, strange, monkeypatch):
    enter = ways.driver.enter

    def more(step, given):
        compiled = enter(step, given)
        vars(compiled.metadata).update(strange)
        return compiled

    monkeypatch.setattr(ways.driver, "enter", more)
    attend, inputs = with_options(**NUMBERS), inputs_of(0, requires_grad=False)
    with pytest.warns(UserWarning, match="does not know the parameters"):
        attend(*inputs)
    # Said once: another warning would be an error. `lln doctor` says it too.
    attend(*inputs)
    assert "does not know the parameters" in compiled_launcher.why_not()
    assert ways.count() == (1, 1, 0)
    assert not ways.driver.seen


@fake_only
@pytest.mark.parametrize(
    ("change", "is_taken"),
    [
        (lambda sizes: [*sizes, 8, 8], True),
        (lambda sizes: [*sizes, 8], True),
        (lambda sizes: None, True),
        (lambda sizes: [*sizes, 8, 8, 8], False),
        (lambda sizes: [*sizes[:-1], 2], False),
        (lambda sizes: sizes[:-1], False),
    ],
)
def test_the_driver_is_asked_for_parameters(ways, change, is_taken, monkeypatch):
    known = {"*": 8, "fp32": 4, "i32": 4, "i64": 8, "i1": 1}

    def sizes_of(function):
        kinds = [kind for kind in ways.driver.steps[function][1] if kind != "constexpr"]
        return change([known["*" if kind[0] == "*" else kind] for kind in kinds])

    monkeypatch.setattr(compiled_launcher, "sizes_of", sizes_of)
    attend, inputs = with_options(**NUMBERS), inputs_of(0, requires_grad=False)
    refusal = contextlib.nullcontext() if is_taken else pytest.warns(UserWarning, match="does not")
    with refusal:
        attend(*inputs)
    attend(*inputs)
    assert ways.count() == (1, 0 if is_taken else 1, 0)
    assert (compiled_launcher.why_not() is None) == is_taken


@fake_only
def test_a_kernel_that_cannot_be_read_is_launched_from_python(ways, monkeypatch):
    def describe(*given):
        raise AttributeError("no signature")

    monkeypatch.setattr(repeats.plain_launches, "describe", describe)
    attend, inputs = with_options(**NUMBERS), inputs_of(0, requires_grad=False)
    with pytest.warns(UserWarning, match="AttributeError: no signature"):
        attend(*inputs)
    attend(*inputs)
    assert ways.count() == (1, 1, 0)


def detached(sides):
    return [side.detach() for side in sides]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_streams_and_graphs(ways):
    attend, inputs = with_options(**NUMBERS), inputs_of(0, dtype=HALF[0])
    # Without their graph: autograd warns if one of another stream is still alive.
    expected = [detached(outcome(attend, inputs)) for _ in range(3)][-1]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = detached(outcome(attend, inputs))
    torch.cuda.current_stream().wait_stream(stream)
    assert are_equal(aside, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = detached(outcome(attend, inputs))
    for side in captured:
        side.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert are_equal(captured, expected)
    assert not ways.by_python


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_fresh_thread_launches(ways):
    import threading

    attend, inputs = with_options(**NUMBERS), inputs_of(0, dtype=HALF[0])
    expected = [outcome(attend, inputs) for _ in range(3)][-1]
    found = []
    thread = threading.Thread(target=lambda: found.extend(outcome(attend, inputs)))
    thread.start()
    thread.join()
    assert are_equal(found, expected)


def test_a_missing_compiler_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("LLN_BUILD_FOLDER", str(tmp_path))
    with pytest.raises(
        lln.BackendUnavailableError, match=r"no C\+\+ compiler found; install g\+\+"
    ):
        launcher_build.build()
    assert not list(tmp_path.iterdir())


def test_a_broken_library_warns_once_and_python_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("LLN_BUILD_FOLDER", str(tmp_path))
    monkeypatch.delenv("LLN_LAUNCHER", raising=False)
    monkeypatch.setattr(compiled_launcher, "_found", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "lln build-launcher" in compiled_launcher.why_not()
    compiled_launcher.library().write_text("not a library")
    assert compiled_launcher.why_not() is None
    with pytest.warns(UserWarning, match="launches from Python"):
        assert compiled_launcher.load(lambda: None) is None
    assert compiled_launcher.load(lambda: None) is None
    assert "cannot be used" in compiled_launcher.why_not()


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("LLN_LAUNCHER", "python")
    monkeypatch.setattr(compiled_launcher, "_found", None)
    assert compiled_launcher.load(lambda: None) is None
    assert "LLN_LAUNCHER=python" in compiled_launcher.why_not()


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("LLN_BUILD_FOLDER", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiled_launcher.library().parent == tmp_path / "lln"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiled_launcher.library().parent == tmp_path / ".cache" / "lln"
    monkeypatch.setattr(torch, "__version__", "99.0")
    other = compiled_launcher.library()
    monkeypatch.undo()
    assert other.name != compiled_launcher.library().name


def moved(fields):
    """A class of calls with the same fields in another order."""

    class Moved(collections.namedtuple("Moved", fields)):
        replace = Call.replace
        _field_defaults = Call._field_defaults

    return Moved


@fake_only
def test_fields_are_found_by_name(ways):
    """Where a field of calls stands makes no difference; one that is missing is an error."""
    attend, inputs = with_options(**NUMBERS), inputs_of(0, requires_grad=False)
    expected = attend(*inputs)
    usual, other = Call("lln", *inputs, **NUMBERS), moved(reversed(FIELDS))
    call = other(**usual._asdict())
    with pytest.raises(RuntimeError, match="a call of lln is expected"):
        repeats.try_fast_path(call, True, "triton")
    repeat = prepared_calls.find(prepared_calls.layout_of_call(usual, "triton")).repeat
    long_way = repeats.differentiate_by_the_long_way
    given = ("cpu", ways.driver.addresses, ways.runtime, long_way)
    with pytest.raises(RuntimeError, match="calls have no field key_mask"):
        compiled_launcher.connect(
            ways.module, *given, moved(name for name in FIELDS if name != "key_mask")
        )
    compiled_launcher.connect(ways.module, *given, other)
    assert ways.module.known() == 0
    repeats.register_native(repeat, call, "triton")
    assert ways.module.known() == 1
    assert torch.equal(repeats.try_fast_path(call, True, "triton"), expected)
    # What the launcher does not know of is not passed over.
    unusual = other(**usual._asdict() | {"longest": 7})
    assert repeats.try_fast_path(unusual, True, "triton") is None


def test_slots_are_arguments_of_recipes(ways):
    """A name that the launches in C++ bring and no kernel takes would be a mistake of writing."""
    taken = set()
    for options in ({"block_size": 16}, {**NUMBERS, "is_causal": True}):
        outcome(with_options(**options), inputs_of(0))
    for recipe in recipes._recipes.values():
        taken |= set(recipe.names)
    assert set(ways.module.slot_names()) == taken
