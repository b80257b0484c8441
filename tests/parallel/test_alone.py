"""A group of one rank: the attention of the top level computes the call, bit for bit."""

import pytest
import torch
import torch.distributed as dist
from tests.parallel.splits import ALONE, TOGETHER, call, inputs_of

import lln
from lln.parallel import collectives


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    place = tmp_path_factory.mktemp("group") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", TOGETHER)
@pytest.mark.parametrize("known", [False, True], ids=["asked", "known"])
def test_the_top_level_computes_it_and_nothing_travels(group, kind, known, monkeypatch):
    monkeypatch.delattr(collectives, "exchange_rows")
    monkeypatch.delattr(collectives, "_gather")
    tensors = inputs_of({"lengths": [21], "hidden": [(0, 0, 2)]})
    options = {} if kind == "lln" else {"block_size": 4}
    given = {"group": group, **({"lengths": [21]} if known else {})}
    found = call(TOGETHER[kind], tensors, {**options, **given})
    expected = call(ALONE[kind], tensors, options)
    assert all(torch.equal(found[name], side) for name, side in expected.items())


def test_lengths_of_other_ranks_are_refused(group):
    sides = torch.randn(3, 1, 2, 6, 4)
    with pytest.raises(lln.InvalidInputError, match="lengths must have"):
        lln.parallel.lln_attention(*sides, group=group, lengths=[6, 6])


def test_operators_are_well_formed(group):
    rows = torch.randn(3, 2, requires_grad=True)
    name = group.group_name
    torch.library.opcheck(torch.ops.lln.gather_ranks.default, (rows, 1, name, "gathering"))
    torch.library.opcheck(torch.ops.lln.exchange_rows.default, (rows, [3], [3], name, "sending"))
