"""An explicit implementation is met for every part of a call or refused, at every entry point."""

import pytest
import torch
from tests.kernels.common import DEVICE, let_auto_take_kernels, limit_chips

import lln
from lln.checks.call import Call
from lln.errors import BackendUnavailableError
from lln.functional.ways import prepare
from lln.testing import make_qkv

GIVEN = {"alpha": 2.0, "beta": 2.0}
BOUNDS = torch.tensor([0, 5, 40])


def dense(attend):
    def call(impl):
        query, key, value = make_qkv(2, 2, 40, 16, device=DEVICE)
        return attend(query, key, value, impl=impl)

    return call


def packed(attend):
    def call(impl):
        query, key, value = (
            side[0].transpose(0, 1) for side in make_qkv(1, 2, 40, 16, device=DEVICE)
        )
        return attend(query, key, value, BOUNDS.to(DEVICE), impl=impl)

    return call


def module(**options):
    def call(impl):
        torch.manual_seed(0)
        layer = lln.LLNDiagAttention(
            32, 2, batch_first=True, block_size=32, impl=impl, device=DEVICE, **options
        )
        return layer(torch.randn(2, 40, 32, device=DEVICE))[0]

    return call


WITH_BLOCKS = {
    "block_diagonal_attention": dense(
        lambda *s, **o: lln.block_diagonal_attention(*s, block_size=32, **o)
    ),
    "lln_diag_attention": dense(lambda *s, **o: lln.lln_diag_attention(*s, block_size=32, **o)),
    "lln_diag_attention_varlen": packed(
        lambda *s, **o: lln.lln_diag_attention_varlen(*s, block_size=32, **o)
    ),
    **{
        f"LLNDiagAttention, {join}": module(join=join)
        for join in ("average", "scale", "ratio", "gate", "heads")
    },
}
EVERY = {
    "lln_attention": dense(lln.lln_attention),
    "lln_attention, causal": dense(
        lambda *s, **o: lln.lln_attention(*s, is_causal=True, **GIVEN, **o)
    ),
    "lln_attention_varlen": packed(lln.lln_attention_varlen),
    "window_attention": dense(lambda *s, **o: lln.window_attention(*s, window=5, **o)),
    "window_attention_varlen": packed(
        lambda *s, **o: lln.window_attention_varlen(*s, window=5, **o)
    ),
    "LLNDiagAttention, running": module(statistics="running"),
    **WITH_BLOCKS,
}


def forbid(monkeypatch, *paths):
    def refuse(*_, **__):
        raise AssertionError("another implementation was asked for")

    for path in paths:
        monkeypatch.setattr(path, refuse)


@pytest.mark.parametrize("name", EVERY)
def test_triton_runs_every_part_in_a_kernel(monkeypatch, name):
    plain = EVERY[name]("eager")
    forbid(
        monkeypatch,
        "lln.eager.run.long_range",
        "lln.eager.run.short_range",
        "lln.eager.run.near_range",
        "lln.eager.packing.near_range",
        "lln.eager.packing._long_range",
        "lln.eager.packing.attend_blocks",
        "lln.functional.match.head_moments",
        "lln.functional.match.packed_moments",
    )
    torch.testing.assert_close(EVERY[name]("triton"), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_eager_runs_no_kernel(monkeypatch, name):
    forbid(
        monkeypatch,
        "lln.kernels.lln.lln_ops.forward",
        "lln.kernels.blocks.block_ops._launches",
        "lln.kernels.moments.moment_ops.statistics",
    )
    EVERY[name]("eager")


@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_triton_refuses_blocks_that_fit_no_tile(monkeypatch, name):
    limit_chips(monkeypatch, block_tokens=16)
    with pytest.raises(BackendUnavailableError, match="no tile for blocks of 32 tokens by 16"):
        WITH_BLOCKS[name]("triton")


@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_auto_runs_such_blocks_in_plain_pytorch(monkeypatch, name):
    plain = WITH_BLOCKS[name]("eager")
    limit_chips(monkeypatch, block_tokens=16)
    let_auto_take_kernels(monkeypatch)
    torch.testing.assert_close(WITH_BLOCKS[name]("auto"), plain, rtol=1e-4, atol=1e-5)


def test_how_the_diagonal_runs(monkeypatch):
    let_auto_take_kernels(monkeypatch)
    call = Call("lln_diag", *make_qkv(2, 2, 40, 16, device=DEVICE), mix=0.5, block_size=32)
    assert prepare(call, "auto").diagonal == "joint"
    assert prepare(call.replace(block_size=512), "auto").block_size == 40
    limit_chips(monkeypatch, joint_tokens=0)
    assert prepare(call, "auto").diagonal == "separate"
    limit_chips(monkeypatch, block_tokens=16)
    assert prepare(call, "auto").diagonal == "eager"
    assert prepare(call.replace(kind="diag"), "auto").impl == "eager"
