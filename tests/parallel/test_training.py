"""Context parallelism inside models: DDP, FSDP2, activation checkpointing, autocast."""

import pytest
import torch
import torch.distributed as dist
from tests.pages import blocks, needs_pages
from tests.parallel.splits import by_rank
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import lln
import lln.parallel

LENGTHS = [6, 9]
KINDS = ("lln", "lln_diag", "lln_keys")
each_kind = pytest.mark.parametrize("kind", KINDS)
OPTIONS = {
    "lln": {},
    "lln_diag": {"block_size": 4},
    "lln_keys": {"block_size": 4, "keys": 3},
}


class Layer(nn.Module):
    """Heads out of tokens, attention, and a projection; one process if there is no group."""

    def __init__(self, kind, group=None):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.group = kind, group
        self.enter, self.leave = nn.Linear(6, 18).double(), nn.Linear(6, 6).double()

    def forward(self, x):
        heads = self.enter(x).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        place = lln if self.group is None else lln.parallel
        options = {} if self.group is None else {"group": self.group}
        attend = getattr(place, f"{self.kind}_attention")
        out = attend(*heads, **OPTIONS[self.kind], **options)
        return x + self.leave(out.transpose(1, 2).flatten(2))


def tokens():
    return torch.randn(2, sum(LENGTHS), 6, dtype=torch.float64, generator=torch.manual_seed(1))


def gradients(model, x):
    model(x).square().sum().backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def in_ddp(group, rank, kind):
    model = DistributedDataParallel(Layer(kind, group), process_group=group)
    found = gradients(model, tokens().split(LENGTHS, 1)[rank])
    return {name.removeprefix("module."): len(LENGTHS) * grad for name, grad in found.items()}


def in_fsdp(group, rank, kind):
    mesh = DeviceMesh.from_group(group, "cpu")
    model = fully_shard(Layer(kind, mesh), mesh=mesh)
    found = gradients(model, tokens().split(LENGTHS, 1)[rank])
    return {name: len(LENGTHS) * grad.full_tensor() for name, grad in found.items()}


def in_checkpoint(group, rank, kind):
    model = Layer(kind, group)
    x = tokens().split(LENGTHS, 1)[rank]
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    found = {name: weight.grad for name, weight in model.named_parameters()}
    for grad in found.values():
        dist.all_reduce(grad, group=group)
    return found


@each_kind
@pytest.mark.parametrize("wrap", [in_ddp, in_fsdp, in_checkpoint])
def test_weights_get_the_gradients_of_one_process(pool, kind, wrap):
    """DDP and FSDP average over the ranks: a sum is the average times their number."""
    expected = gradients(Layer(kind), tokens())
    for found in pool.run(wrap, 2, kind):
        assert set(found) == set(expected)
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-11, atol=1e-11)


def under_autocast(group, rank, case):
    with torch.autocast("cpu", torch.bfloat16):
        return by_rank(group, rank, case)["out"].dtype


def test_autocast(pool):
    case = {"kind": "lln", "lengths": LENGTHS, "dtype": torch.float32}
    assert pool.run(under_autocast, 2, case) == [torch.bfloat16] * 2


def read_page(group, rank):
    # The second block, of a Hugging Face model, runs in test_huggingface.py.
    names = {}
    exec(blocks("docs/parallel.md")[0], names)
    return names["out"].shape


@needs_pages
def test_the_guide_runs(pool):
    assert pool.run(read_page, 4) == [(1, 8, 100 + 20 * rank, 64) for rank in range(4)]
