"""What ranks cannot do together is refused with one sentence, on all of them."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from tests.parallel.splits import TOGETHER
from torch.distributed.device_mesh import init_device_mesh

import lln
import lln.parallel
from lln.parallel import collectives


def message_of(call):
    """The error of a call, by its type and text; None if it raises none."""
    try:
        call()
    except lln.LLNError as error:
        return type(error).__name__, str(error)
    return None


def attend(group, rank, kind, shapes, options):
    """A call with the shapes and options of a rank: each is a list, or the same for all."""
    shape = shapes[rank] if isinstance(shapes, list) else shapes
    options = options[rank] if isinstance(options, list) else options
    sides = torch.randn(3, *shape, dtype=torch.float64)
    return message_of(lambda: TOGETHER[kind](*sides, group=group, **options))


def refused(pool, *fragments, kind="lln", shapes=(1, 2, 6, 4), options=None, error=None):
    """Both ranks refuse with the same sentence."""
    found = pool.run(attend, 2, kind, shapes, {} if options is None else options)
    assert found[0] == found[1]
    name, message = found[0]
    assert name == (error or "InvalidInputError")
    assert message.endswith(".")
    assert len(message) < 300
    assert not re.search(r"[.!?]\s+[A-Z]", message), f"more than one sentence: {message}"
    assert all(fragment in message for fragment in fragments), message


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("batch size, got 1 on rank 0 and 2 on rank 1", [(1, 2, 6, 4), (2, 2, 6, 4)]),
        ("number of query heads, got 2", [(1, 2, 6, 4), (1, 3, 6, 4)]),
        ("head width, got 4 on rank 0 and 5 on rank 1", [(1, 2, 6, 4), (1, 2, 9, 5)]),
    ],
)
def test_ranks_that_disagree_on_shapes(pool, name, shapes):
    refused(pool, "lln.parallel.lln_attention", name, shapes=shapes)


@pytest.mark.parametrize(
    ("fragment", "first", "second"),
    [
        ("matching, got 'variance' on rank 0 and 'entropy' on rank 1", {}, {"matching": "entropy"}),
        ("alpha, got None on rank 0 and 2.0 on rank 1", {}, {"alpha": 2.0, "beta": 1.0}),
        ("beta, got 3.0", {"alpha": 2.0, "beta": 3.0}, {"alpha": 2.0, "beta": 1.0}),
        (
            "is_causal, got False on rank 0 and True on rank 1",
            {"alpha": 1.0, "beta": 1.0},
            {"alpha": 1.0, "beta": 1.0, "is_causal": True},
        ),
    ],
)
def test_ranks_that_disagree_on_options(pool, fragment, first, second):
    refused(pool, fragment, options=[first, second])


def test_ranks_that_disagree_on_blocks(pool):
    refused(pool, "block_size", kind="lln_diag", options=[{"block_size": 4}, {"block_size": 3}])
    refused(pool, "keys, got 2", kind="lln_keys", options=[{"keys": 2}, {"keys": 3}])


@pytest.mark.parametrize(
    ("fragment", "first", "second"),
    [
        ("offset, got 0.0 on rank 0 and None on rank 1", {"offset": 0.0}, {}),
        (
            "offset, got 5e-324 on rank 0 and a tensor for 1 heads on rank 1",
            {"offset": 5e-324},
            {"offset": torch.zeros(())},
        ),
        (
            "offset, got a tensor for 1 heads on rank 0 and a tensor for 2 heads on rank 1",
            {"offset": torch.zeros(())},
            {"offset": torch.zeros(1, 2, 1, 1)},
        ),
    ],
)
def test_ranks_that_disagree_on_the_offset(pool, fragment, first, second):
    refused(pool, fragment, kind="lln_keys", options=[first, second])


def test_zero_is_zero(pool):
    options = [{"offset": 0.0}, {"offset": -0.0}]
    assert pool.run(attend, 2, "lln_keys", (1, 2, 6, 4), options) == [None, None]


def different(group, rank):
    sides = torch.randn(3, 1, 2, 6, 4)
    kind = ("lln", "lln_keys")[rank]
    return message_of(lambda: TOGETHER[kind](*sides, group=group))


def test_ranks_that_call_different_operations(pool):
    (_, first), (_, second) = pool.run(different, 2)
    fragment = "operation, got lln_attention on rank 0 and lln_keys_attention on rank 1"
    assert fragment in first
    assert fragment in second


def frozen(group, rank):
    sides = torch.randn(3, 1, 2, 6, 4, requires_grad=rank == 0).unbind()
    return message_of(lambda: lln.parallel.lln_attention(*sides, group=group))


def test_gradients_on_one_rank_only(pool):
    """The backward pass is a collective: a rank that does not take part would stop the others."""
    assert all("need gradients" in message for _, message in pool.run(frozen, 2))


def test_a_rank_that_refuses_its_arguments_stops_the_others(pool):
    options = [{}, {"matching": "mean"}]
    (first, message), (second, own) = pool.run(attend, 2, "lln", (1, 2, 6, 4), options)
    assert (first, second) == ("PeerError", "InvalidInputError")
    assert "rank 1 of the group refused its arguments" in message
    assert "matching must be one of" in own


def unequal(group, rank):
    """As many queries as keys, but not on every rank, and a mask that would say which count."""
    query, key = torch.randn(1, 2, (4, 8)[rank], 4), torch.randn(1, 2, 6, 4)
    mask = torch.ones(1, 6, dtype=torch.bool)
    return message_of(
        lambda: lln.parallel.lln_attention(query, key, key, key_mask=mask, group=group)
    )


def test_a_mask_that_cannot_say_which_queries_count(pool):
    assert all("cut both in the same places" in text for _, text in pool.run(unequal, 2))


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("kind", TOGETHER)
def test_implementations_that_cannot_read_other_summaries(pool, kind, impl):
    refused(pool, "impl='auto'", kind=kind, options={"impl": impl}, error="BackendUnavailableError")


def test_choices_that_are_not_available(pool):
    keys = torch.zeros(1, 2, 1, 3, dtype=torch.int64)
    refused(pool, "as a number", kind="lln_keys", options={"keys": keys})


def test_causal_calls_need_given_temperatures(pool):
    refused(pool, "alpha and beta", options={"is_causal": True}, error="CausalStatisticsError")


def test_causal_exact_keys_are_sent_to_pages(pool):
    refused(pool, "use lln.page_attention", kind="lln_keys", options={"is_causal": True})


def wrong_lengths(group, rank, lengths):
    sides = torch.randn(3, 1, 2, 6, 4)
    return message_of(lambda: lln.parallel.lln_attention(*sides, group=group, lengths=lengths))


@pytest.mark.parametrize("lengths", [[6], [5, 5], [6, 6, 6], [6, -1], [6, "6"]])
def test_lengths_that_do_not_fit(pool, lengths):
    assert any("lengths must" in found[1] for found in pool.run(wrong_lengths, 2, lengths))


def known(group, rank, shapes, lengths, masked):
    """A first call with lengths, by a group that has not compared yet."""
    sides = torch.randn(3, *shapes[rank])
    mask = torch.ones(shapes[rank][0], shapes[rank][2], dtype=torch.bool)
    options = {"lengths": lengths[rank], "key_mask": mask if masked[rank] else None}
    # Every rank of the world makes the group.
    own = dist.new_group([0, 1])
    if rank > 1:
        return None
    return message_of(lambda: lln.parallel.lln_attention(*sides, group=own, **options))


@pytest.mark.parametrize(
    ("fragment", "change"),
    [
        ("number of query heads, got 2 on rank 0 and 3 on rank 1", {"shapes": (1, 3, 6, 4)}),
        ("head width, got 4 on rank 0 and 5 on rank 1", {"shapes": (1, 2, 6, 5)}),
        ("rank 1 of the group refused its arguments", {"lengths": [6, 5]}),
        ("key_mask or none", {"masked": True}),
    ],
)
def test_known_lengths_and_ranks_that_disagree(pool, fragment, change):
    """The first call compares: where shapes differ Gloo would end the process."""
    given = {"shapes": (1, 2, 6, 4), "lengths": [6, 6], "masked": False}
    given = {name: [side, change.get(name, side), side, side] for name, side in given.items()}
    first, second, *_ = pool.run(known, 4, *given.values())
    assert fragment in first[1]
    assert first == second or "lengths must have" in second[1]


def later(group, rank):
    """How many gathers the first calls of a new group make, and the second ones."""
    own = dist.new_group(list(range(4)))
    real, made = collectives._all_gather, []

    def counted(*given, **options):
        made.append(given)
        return real(*given, **options)

    collectives._all_gather = counted
    options = {"group": own, "lengths": [6] * 4, "alpha": 1.0, "beta": 1.0, "impl": "eager"}
    counts = []
    try:
        for _ in range(3):
            lln.parallel.lln_diag_attention(*torch.randn(3, 1, 2, 6, 3), **options)
            counts.append(len(made))
    finally:
        collectives._all_gather = real
    return counts


def test_later_calls_with_known_lengths_do_not_compare(pool):
    """One gather more in the first: the others gather the summaries alone."""
    assert pool.run(later, 4) == [[2, 3, 4]] * 4


def wrong_groups(group, rank):
    sides = torch.randn(3, 1, 2, 6, 4)
    outside = dist.GroupMember.NON_GROUP_MEMBER
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    good = lln.parallel.lln_attention(*sides, group=mesh["context"])
    return good.shape, [
        message_of(partial(lln.parallel.lln_attention, *sides, group=one))
        for one in (outside, mesh, "gloo")
    ]


def test_wrong_groups(pool):
    for shape, found in pool.run(wrong_groups, 4):
        assert shape == (1, 2, 6, 4)
        outside, mesh, name = (message for _, message in found)
        assert "which is not in the group" in outside
        assert "give mesh['name of the axis']" in mesh
        assert "got str" in name


def test_no_processes():
    with pytest.raises(lln.InvalidInputError, match="init_process_group first"):
        lln.parallel.lln_attention(*torch.randn(3, 1, 2, 6, 4))


def test_arguments_that_do_not_exist():
    with pytest.raises(lln.UnexpectedArgumentError, match="attn_mask"):
        lln.parallel.lln_attention(*torch.randn(3, 1, 2, 6, 4), attn_mask=None)
