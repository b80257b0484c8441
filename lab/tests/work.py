"""Work, counted and not timed, so the same on every machine and at every load.

It is the floating-point operations of products and convolutions (torch's counter) plus every number
that an operator writes. The latter stands for what the counter does not know: elementwise work,
sorting, and Fourier transforms, whose N log N then counts as N.
"""

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


class Written(TorchDispatchMode):
    """Counts the numbers that operators write; views write none."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {one.data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        out = func(*args, **(kwargs or {}))
        self.total += sum(
            one.numel()
            for one in tree_leaves(out)
            if isinstance(one, Tensor) and one.data_ptr() not in given
        )
        return out


def work(call):
    """Operations of a call."""
    # Fused softmax does not say what it does; written out, it does the same work.
    products, numbers = FlopCounterMode(display=False), Written()
    with sdpa_kernel(SDPBackend.MATH), products, numbers:
        call()
    return products.get_total_flops() + numbers.total
