"""Context parallelism on a GPU: tensors stay there, and the results are those of one process.

One GPU holds one rank of NCCL, so the group has one member: what travels goes to itself.
"""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from tests.parallel.splits import ALONE, TOGETHER, call, inputs_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASES = {
    "matched": {},
    "padded": {"hidden": [(0, 0, 2), (1, 9, 12)]},
    "causal": {"learn": ("alpha", "beta"), "options": {"is_causal": True}},
}


@pytest.fixture(scope="module", params=["nccl", "cpu:gloo,cuda:nccl"])
def group(request, tmp_path_factory):
    place = tmp_path_factory.mktemp("group") / "meeting"
    torch.cuda.set_device(0)
    dist.init_process_group(request.param, init_method=f"file://{place}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def among_others(monkeypatch):
    """One rank takes the way of several: what travels goes to itself."""
    monkeypatch.setattr("lln.parallel.together.is_alone", lambda *_: False)


@pytest.mark.parametrize(
    ("kind", "name"),
    [pair for pair in product(TOGETHER, CASES) if pair != ("lln_keys", "causal")],
)
@pytest.mark.parametrize("known", [False, True], ids=["asked", "known"])
def test_one_rank_is_one_process(group, among_others, kind, name, known):
    case = {"lengths": [21], **CASES[name]}
    options = dict(case.get("options", {}))
    if kind != "lln":
        options["block_size"] = 4
    if kind == "lln_keys":
        options["keys"] = 3
    tensors = {name: side.cuda() for name, side in inputs_of(case).items()}
    # The gradient of an indexed row is added in any order on a GPU.
    expected = call(ALONE[kind], tensors, {**options, "impl": "eager"})
    lengths = {"lengths": case["lengths"]} if known else {}
    found = call(TOGETHER[kind], tensors, {**options, **lengths, "group": group, "impl": "eager"})
    for name, side in expected.items():
        assert found[name].device.type == "cuda"
        torch.testing.assert_close(found[name], side, rtol=1e-11, atol=1e-11)


KERNEL_CASES = {
    "given": {"options": {"alpha": 1.3, "beta": 1.1}},
    "matched": {},
    "learned": {"learn": ("alpha", "beta"), "heads": 4, "options": {"enable_gqa": True}},
    "padded": {"hidden": [(0, 0, 20), (1, 90, 120)]},
}


@pytest.mark.parametrize("name", KERNEL_CASES)
@pytest.mark.parametrize("kind", ["lln", "lln_diag"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_one_rank_among_others(group, among_others, kind, name, dtype):
    case = {"lengths": [900], "width": 64, "value_width": 64, **KERNEL_CASES[name]}
    options = dict(case.get("options", {}))
    if kind == "lln_diag":
        options["block_size"] = 64
    exact = {name: side.cuda() for name, side in inputs_of({**case, "cast": dtype}).items()}
    wide = {
        name: side.double() if side.is_floating_point() else side for name, side in exact.items()
    }
    expected = call(ALONE[kind], wide, {**options, "impl": "eager"})
    found = call(TOGETHER[kind], exact, {**options, "group": group})
    budget = 2e-5 if dtype == torch.float32 else 3e-2
    for name, side in expected.items():
        error = (found[name].double() - side).abs().max() / side.abs().max().clamp_min(1e-3)
        assert error <= budget, f"{name} is off by {error:.1e}"


KEYS_CASES = {
    **KERNEL_CASES,
    "learned": {**KERNEL_CASES["learned"], "learn": ("alpha", "beta", "offset")},
    "groups": {"options": {"block_size": 64, "group_size": 16, "keys": 100, "scale": -0.1}},
    "whole": {"lengths": [1024], "options": {"keys": 64}},
    "few": {"lengths": [70], "options": {"keys": 64}},
    "none": {"options": {"keys": 0}},
    "padded behind": {"hidden": [(0, 500, 520), (1, 850, 900)]},
}


def size_of(name, tensors, gradients):
    """The largest number; for the sums over all tokens √Σ term², because their terms cancel."""
    size = gradients[name].abs().max().float().clamp_min(1e-3)
    of = {"alpha": "query", "beta": "key", "offset": "query"}.get(name)
    if of is None:
        return size
    terms = (tensors[of].float() * gradients[of].float()).nan_to_num().sum(-1)
    return torch.maximum(size, terms.square().sum().sqrt())


@pytest.mark.parametrize("name", KEYS_CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_keys_of_one_rank_among_others(group, among_others, name, dtype):
    """The kernels of the top level choose from the same rounded mean queries, so the same keys."""
    case = {"lengths": [900], "width": 64, "value_width": 64, **KEYS_CASES[name]}
    options = {"keys": 40, **case.get("options", {})}
    tensors = {name: side.cuda() for name, side in inputs_of({**case, "cast": dtype}).items()}
    expected = call(ALONE["lln_keys"], tensors, {**options, "impl": "triton"})
    found = call(TOGETHER["lln_keys"], tensors, {**options, "group": group, "impl": "triton"})
    budget = 2e-5 if dtype == torch.float32 else 3e-2
    for name, side in expected.items():
        assert found[name].dtype == side.dtype
        error = (found[name] - side).abs().max().float() / size_of(name, tensors, expected)
        assert error <= budget, f"{name} is off by {error:.1e}"


def test_exact_keys_by_default_take_the_kernels(group, among_others):
    case = {"lengths": [900], "width": 64, "value_width": 64, "cast": torch.bfloat16}
    tensors = {name: side.cuda() for name, side in inputs_of(case).items()}
    default, kernels = (
        call(TOGETHER["lln_keys"], tensors, {"group": group, "impl": impl})
        for impl in ("auto", "triton")
    )
    assert torch.equal(default["out"], kernels["out"])


@pytest.mark.parametrize("kind", TOGETHER)
def test_one_rank_alone_calls_the_attention_itself(group, kind):
    case = {"lengths": [300], "width": 32, "value_width": 32, "cast": torch.bfloat16}
    tensors = {name: side.cuda() for name, side in inputs_of(case).items()}
    expected = call(ALONE[kind], tensors, {})
    found = call(TOGETHER[kind], tensors, {"group": group})
    assert all(torch.equal(found[name], side) for name, side in expected.items())
