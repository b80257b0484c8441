"""Tokens and channels so far apart that a tile's 32-bit offsets would not reach them."""

import pytest
import torch
from tests.kernels.common import DEVICE, room_of

import lln
from lln.kernels.launching.shapes import within_reach
from lln.testing import make_qkv

GIVEN = {"alpha": 1.3, "beta": 1.1, "impl": "triton"}
ATTEND = {
    "lln": lambda *inputs: lln.lln_attention(*inputs, **GIVEN),
    "matched": lambda *inputs: lln.lln_attention(*inputs, impl="triton"),
    "lln_diag": lambda *inputs: lln.lln_diag_attention(*inputs, **GIVEN, block_size=16),
    "causal": lambda *inputs: lln.lln_attention(*inputs, **GIVEN, is_causal=True),
    "diag": lambda *inputs: lln.block_diagonal_attention(*inputs, block_size=16, impl="triton"),
}
# The last of ten tokens, or channels, lies beyond 2³¹ elements.
FAR = 2**28
LAYOUTS = {"tokens": (0, 0, FAR, 1), "channels": (0, 0, 1, FAR)}


@pytest.fixture(scope="module")
def room():
    return room_of(9 * FAR + 16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["query", "key", "value", "gradient"])
@pytest.mark.parametrize("name", ATTEND)
def test_far_tokens_and_channels(name, which, layout, room):
    near = dict(zip(("query", "key", "value"), make_qkv(1, 1, 10, 10, device=DEVICE), strict=True))
    near["gradient"] = torch.randn_like(near["query"])
    near = {side: tensor.half() for side, tensor in near.items()}
    far = room.as_strided(near[which].shape, LAYOUTS[layout]).copy_(near[which])
    found = []
    for *inputs, upstream in (near.values(), (near | {which: far}).values()):
        inputs = [side.detach().requires_grad_() for side in inputs]
        out = ATTEND[name](*inputs)
        found.append((out, *torch.autograd.grad(out, inputs, upstream)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_only_what_is_far_is_copied():
    for sizes, strides, is_near in (
        ((2, 3, 70, 16), (3360, 1120, 16, 1), True),
        ((2, 3, 70, 16), (3360, 16, 48, 1), True),
        ((2, 3, 70, 16), (1, 2, 6, 2**23), False),
        ((2, 3, 70, 16), (1, 2, 2**23, 6), False),
        # One token reaches nowhere, whatever its stride is.
        ((1, 1, 1, 16), (16, 16, FAR, 1), True),
    ):
        tensor = torch.empty_strided(sizes, strides, device="meta")
        assert (within_reach(tensor) is tensor) == is_near
