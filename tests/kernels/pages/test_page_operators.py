"""Pages under a compiler."""

import torch
from tests.kernels.common import DEVICE
from tests.kernels.pages.test_page_kernels import PLAIN

from lln.kernels.pages import page_ops
from lln.testing import make_qkv


def test_compiled_calls_are_the_plain_ones():
    def attend(query, key, value):
        chosen = page_ops.fused_page_choice(query, key, 2, **PLAIN)
        return page_ops.fused_pages(query, key, value, chosen, **PLAIN)

    inputs = make_qkv(1, 2, 40, 16, device=DEVICE, requires_grad=True)
    layer = torch.compile(attend, fullgraph=True, backend="aot_eager")
    out, plain = layer(*inputs), attend(*inputs)
    torch.testing.assert_close(out, plain)
    grads, plain_grads = (torch.autograd.grad(side.sum(), inputs) for side in (out, plain))
    torch.testing.assert_close(grads, plain_grads)
