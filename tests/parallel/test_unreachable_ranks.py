"""A rank that stops or does not come: the others fail in time, with the name of the operation."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.parallel.workers import SECONDS

import lln.parallel
from lln.errors import PeerError

PATIENCE = 5
# Gloo names the timeout that ended the wait: that of the group, and not that of all processes.
OWN_TIMEOUT = f"Timed out waiting {1000 * PATIENCE}ms"


def waiting(group, rank, moment):
    """Rank 1 leaves before the call, or between the forward and the backward pass."""
    own = dist.new_group([0, 1], timeout=timedelta(seconds=PATIENCE))
    if rank > 1:
        return None
    sides = torch.randn(3, 1, 2, 6, 4, requires_grad=True).unbind()
    try:
        if rank == 1 and moment == "before":
            return None
        out = lln.parallel.lln_attention(*sides, group=own)
        if rank == 1 and moment == "between":
            return None
        if rank == 1:
            os._exit(1)
        out.sum().backward()
    except PeerError as error:
        return str(error)
    return None


def test_a_rank_that_does_not_come(pool):
    message = pool.run(waiting, 4, "before")[0]
    assert message.startswith("lln.parallel.lln_attention: comparing the ranks' arguments failed")
    assert "on rank 0 of 2" in message
    assert OWN_TIMEOUT in message


@pytest.mark.slow
def test_a_rank_that_does_not_go_back(pool):
    message = pool.run(waiting, 4, "between")[0]
    assert message.startswith("lln.parallel.lln_attention: merging the summaries (backward) failed")
    assert OWN_TIMEOUT in message


def left_alone(group, rank):
    """Rank 1 does not come to what is no attention."""
    own = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank > 0:
        return None
    try:
        lln.parallel.sum_gradients(torch.nn.Linear(2, 2), own)
    except PeerError as error:
        return str(error)
    return None


def test_gradients_that_one_rank_does_not_add(pool):
    message = pool.run(left_alone, 4)[0]
    assert message.startswith(
        "lln.parallel.sum_gradients: adding up the gradients of weight failed"
    )
    assert "on rank 0 of 2" in message


def test_a_rank_whose_process_dies(pool):
    found, dead, *_ = pool.run(waiting, 4, "dies", may_die=True)
    assert dead is None
    assert found.startswith("lln.parallel.lln_attention: merging the summaries (backward) failed")
    assert "on rank 0 of 2" in found
    # At once where the connection tells, in several words, else after the group's own timeout.
    assert f"{1000 * SECONDS}ms" not in found
