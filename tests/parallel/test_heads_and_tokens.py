"""Tokens divided between two ranks and heads between two others: results are those of one."""

import pytest
import torch
from tests.parallel.splits import TOGETHER, assert_same, by_one, call, inputs_of, shard_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import lln.parallel

LENGTHS = [6, 9]
CASES = {
    "matched": {"kind": "lln"},
    "learned": {"kind": "lln", "learn": ("alpha", "beta")},
    "grouped": {"kind": "lln", "options": {"enable_gqa": True}, "heads": 4},
    "padded": {"kind": "lln_diag", "hidden": [(0, 0, 3)], "options": {"block_size": 4}},
    "mixed": {"kind": "lln_diag", "learn": ("mix",), "options": {"block_size": 4, "scale": 0.3}},
    "keys": {
        "kind": "lln_keys",
        "learn": ("alpha", "beta", "offset"),
        "options": {"block_size": 4, "keys": 3},
    },
}


def meshes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "heads"))
    return mesh["context"], mesh["heads"]


def by_two_axes(group, rank, case):
    """This rank's tokens and heads; what comes out is gathered over the heads."""
    context, heads = meshes()
    own = shard_of(inputs_of(case), case, context.get_local_rank())
    given = {
        name: distribute_tensor(side, heads, [Shard(1)])
        for name, side in own.items()
        if name in ("query", "key", "value", "upstream")
    }
    found = call(TOGETHER[case["kind"]], own | given, case.get("options", {}) | {"group": context})
    assert list(found["out"].placements) == [Shard(1)]
    return {
        name: side.full_tensor() if isinstance(side, DTensor) else side
        for name, side in found.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_both(pool, name):
    case = {"lengths": LENGTHS, **CASES[name]}
    first, same, second, last = pool.run(by_two_axes, 4, case)
    assert_same([first, second], by_one(case))
    assert_same([same, last], by_one(case))


def refusals(group, rank):
    """Heads, or tokens, divided between the very ranks that share the sequence."""
    context, heads = meshes()
    side = torch.randn(1, 2, 6, 4)
    said = []
    for placement, mesh in ((Shard(1), context), (Shard(2), context), (Shard(2), heads)):
        sides = [distribute_tensor(side, mesh, [placement])] * 3
        with pytest.raises(lln.InvalidInputError) as caught:
            lln.parallel.lln_attention(*sides, group=context)
        said.append(str(caught.value))
    alike = distribute_tensor(side, heads, [Replicate()])
    assert lln.parallel.lln_attention(alike, alike, alike, group=context).shape == side.shape
    return said


def test_what_cannot_work_is_refused(pool):
    for same, tokens, others in pool.run(refusals, 4):
        assert "divide heads along another axis of the mesh" in same
        assert "to_local()" in tokens
        assert "to_local() of every side" in others
