"""Context parallelism on a GPU: tensors stay there, and the results are those of one process.

One GPU holds one rank of NCCL, so the group has one member: what travels goes to itself.
"""

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


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", TOGETHER)
@pytest.mark.parametrize("known", [False, True], ids=["asked", "known"])
def test_one_rank_is_one_process(group, kind, name, known):
    case = {"lengths": [21], **CASES[name]}
    options = dict(case.get("options", {}))
    if kind != "lln":
        options["block_size"] = 4
    if kind == "lln_keys":
        options |= {"keys": 3} | ({"offset": 0.5} if "is_causal" in options else {})
    tensors = {name: side.cuda() for name, side in inputs_of(case).items()}
    # The gradient of an indexed row is added in any order on a GPU.
    expected = call(ALONE[kind], tensors, {**options, "impl": "eager"})
    lengths = {"lengths": case["lengths"]} if known else {}
    found = call(TOGETHER[kind], tensors, {**options, **lengths, "group": group})
    for name, side in expected.items():
        assert found[name].device.type == "cuda"
        torch.testing.assert_close(found[name], side, rtol=1e-11, atol=1e-11)
