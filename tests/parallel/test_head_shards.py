"""DTensors whose heads or samples lie on several ranks: outputs and gradients are those of one."""

import pytest
import torch
from tests.pages import blocks, needs_pages
from tests.parallel.splits import ALONE

import lln

FIXED = {"alpha": 1.3, "beta": 1.1}
VARLEN = {
    "lln": lln.lln_attention_varlen,
    "lln_diag": lln.lln_diag_attention_varlen,
    "lln_keys": lln.lln_keys_attention_varlen,
}


def inputs_of(case):
    """The tensors of a case, the same in every process."""
    generator = torch.Generator().manual_seed(3)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch, heads, key_heads = case.get("batch", 2), case.get("heads", 4), case.get("key_heads", 4)
    tokens = 13
    if case.get("packed"):
        lead, key_lead = (tokens, heads), (tokens, key_heads)
    else:
        lead, key_lead = (batch, heads, tokens), (batch, key_heads, tokens)
    tensors = {
        "query": randn(*lead, 5),
        "key": randn(*key_lead, 5) + 0.3,
        "value": randn(*key_lead, 3),
        "upstream": randn(*lead, 3),
    }
    for name, shape in case.get("learn", {}).items():
        tensors[name] = 1.2 + 0.3 * torch.tanh(randn(*shape))
    if case.get("masked"):
        tensors["key_mask"] = torch.rand(batch, tokens, generator=generator) > 0.3
    return tensors


def attention_of(case):
    return (VARLEN if case.get("packed") else ALONE)[case["kind"]]


def options_of(case):
    options = dict(case.get("options", {}))
    if case.get("packed"):
        options["cu_seqlens"] = torch.tensor([0, 4, 13])
    return options


def with_gradients(case, tensors):
    leaves = {
        name: side.clone().requires_grad_() if side.is_floating_point() else side
        for name, side in tensors.items()
        if name != "upstream"
    }
    out = attention_of(case)(**leaves, **options_of(case))
    (out * tensors["upstream"]).sum().backward()
    grads = {name: side.grad for name, side in leaves.items() if side.is_floating_point()}
    return {"out": out.detach(), **grads}


def by_shards(group, rank, case):
    """Every rank distributes the same tensors, and gathers what comes out."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    if "mesh" in case:
        mesh = init_device_mesh("cpu", case["mesh"], mesh_dim_names=("first", "second"))
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
    places = [Shard(dim) for dim in case["divided"]]
    tensors = {}
    for name, side in inputs_of(case).items():
        if name in ("query", "key", "value", "upstream"):
            tensors[name] = distribute_tensor(side, mesh, places)
        elif name in case.get("as_dtensor", ()):
            tensors[name] = distribute_tensor(side, mesh, [Replicate()] * mesh.ndim)
        else:
            tensors[name] = side
    found = with_gradients(case, tensors)
    assert list(found["out"].placements) == places
    return {
        name: side.full_tensor() if isinstance(side, DTensor) else side
        for name, side in found.items()
    }


CASES = {
    "matched": {"kind": "lln"},
    "uneven": {"kind": "lln", "heads": 3, "key_heads": 3},
    "samples": {"kind": "lln", "divided": [0], "masked": True},
    "learned": {"kind": "lln", "learn": {"alpha": (1, 4, 1, 1), "beta": (1, 1, 1, 1)}},
    "dtensors": {
        "kind": "lln",
        "learn": {"alpha": (2, 4, 1, 1), "beta": (1, 4, 1, 1)},
        "as_dtensor": ["alpha", "beta"],
    },
    "grouped": {"kind": "lln", "key_heads": 2, "options": {"enable_gqa": True}},
    "causal": {"kind": "lln", "options": {**FIXED, "is_causal": True}},
    "blocks": {"kind": "lln_diag", "learn": {"mix": (1, 4, 1, 1)}, "options": {"block_size": 4}},
    "mixed rows": {"kind": "lln_diag", "learn": {"mix": (2, 1, 13, 1)}, "options": FIXED},
    "keys": {
        "kind": "lln_keys",
        "learn": {"offset": (1, 4, 1, 1)},
        "options": {"block_size": 4, "keys": 3, **FIXED},
    },
    "packed": {"kind": "lln", "packed": True},
    "packed keys": {
        "kind": "lln_keys",
        "packed": True,
        "options": {"block_size": 4, "keys": 3},
    },
}


@pytest.mark.parametrize("name", CASES)
def test_heads_or_samples_on_two_ranks(pool, name):
    case = {"divided": [1], **CASES[name]}
    check(pool, 2, case)


def test_heads_and_samples_on_four(pool):
    learn = {"alpha": (1, 4, 1, 1), "beta": (1, 1, 1, 1)}
    check(pool, 4, {"kind": "lln", "divided": [0, 1], "mesh": (2, 2), "learn": learn})


def check(pool, size, case):
    expected = with_gradients(case, inputs_of(case))
    for found in pool.run(by_shards, size, case):
        assert set(found) == set(expected)
        for name, side in expected.items():
            torch.testing.assert_close(found[name], side, rtol=1e-12, atol=1e-12)


def refusals(group, rank):
    """The messages of calls that cannot work."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")
    sides = torch.randn(3, 2, 4, 6, 5).unbind()
    heads = [distribute_tensor(side, mesh, [Shard(1)]) for side in sides]
    samples = [distribute_tensor(side, mesh, [Shard(0)]) for side in sides]
    tokens = [distribute_tensor(side, mesh, [Shard(2)]) for side in sides]
    one_head = distribute_tensor(sides[1][:, :1], mesh, [Shard(1)])
    calls = [
        lambda: lln.lln_attention(*tokens),
        lambda: lln.lln_attention(heads[0], *sides[1:]),
        lambda: lln.lln_attention(heads[0], *samples[1:]),
        lambda: lln.lln_attention(*heads, matching="paper"),
        lambda: lln.lln_attention(heads[0], one_head, one_head, enable_gqa=True),
    ]
    said = []
    for attend in calls:
        with pytest.raises(lln.InvalidInputError) as caught:
            attend()
        said.append(str(caught.value))
    return said


def test_what_cannot_work_is_refused(pool):
    parts = ["lln.parallel for tokens", "an ordinary tensor", "placed as query", "give alpha"]
    for said in pool.run(refusals, 2):
        for part, message in zip([*parts, "1 key heads"], said, strict=True):
            assert part in message


def read_page(group, rank):
    from torch.distributed.device_mesh import DeviceMesh

    names = {"lln": lln, "mesh": DeviceMesh.from_group(group, "cpu")}
    names |= dict(zip(("query", "key", "value"), torch.randn(3, 1, 4, 9, 8), strict=True))
    exec(blocks("docs/parallel.md")[1], names)
    return list(names["out"].to_local().shape)


@needs_pages
def test_the_guide_runs(pool):
    assert pool.run(read_page, 2) == [[1, 2, 9, 8]] * 2
