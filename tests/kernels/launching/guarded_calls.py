"""Calls whose inputs end, then such whose inputs begin, at memory that must not be touched.

A read outside of an input ends the process with a signal. `test_guard_pages` runs this.
"""

import ctypes
import mmap

import torch
from tests.kernels.quick_interpreter import quicken

import lln
from lln.kernels.launching import sizes
from lln.testing import make_qkv

PAGE = mmap.PAGESIZE
KEPT = []
GIVEN = {"alpha": 2.0, "beta": 2.0, "impl": "triton"}


def guarded(tensor, behind):
    """A copy with a page behind its last number, or before its first one, that nobody may read."""
    size = tensor.numel() * tensor.element_size()
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 1) * PAGE)
    KEPT.append(memory)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    closed = begin + pages * PAGE if behind else begin
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(closed), PAGE, 0) == 0
    offset = pages * PAGE - size if behind else PAGE
    count = tensor.numel()
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=count, offset=offset)
    return copy.view(tensor.shape).copy_(tensor)


def main(behind):
    """Forward and backward over full and shorter tiles, of every family of kernels."""
    calls = {
        "narrow": (lln.lln_attention, 32, {}),
        "blocks": (lln.lln_diag_attention, 32, {}),
        "causal": (lln.lln_attention, 64, {"is_causal": True}),
        "causal blocks": (lln.lln_diag_attention, 64, {"is_causal": True}),
        "wide": (lln.lln_attention, 128, {}),
        "wide blocks": (lln.lln_diag_attention, 128, {"block_size": 64}),
        "tiled blocks": (lln.lln_diag_attention, 144, {"block_size": 80}),
    }
    for name, (attend, width, options) in calls.items():
        for tokens in (128, 90):
            print("behind" if behind else "before", name, tokens, flush=True)
            sides = make_qkv(1, 1, tokens, width, dtype=torch.float16)
            sides = [guarded(side, behind).requires_grad_() for side in sides]
            sizes.overrides.clear()
            if "causal" in name:
                # The interpreter has no bfloat16, and other types go another way by themselves.
                sizes.overrides["has_chunks"] = True
            if name == "wide blocks":
                # As where heads are many: one program goes over all tiles.
                sizes.overrides["ahead_read"] = sizes.Tile(64, 4, 2, programs=0)
            out = attend(*sides, **GIVEN, **options)
            torch.autograd.grad(out, sides, guarded(torch.ones_like(out), behind))


if __name__ == "__main__":
    quicken()
    main(behind=True)
    main(behind=False)
