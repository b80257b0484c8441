"""How the largest tensor of a forward grows with the length: an N×N somewhere shows at once."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.untyped_storage().nbytes())
        return out


def growth(layer, shorter=512, longer=2048):
    """Bytes of the largest tensor at the longer length over those at the shorter one."""
    found = []
    for length in (shorter, longer):
        x = torch.randn(1, length, layer.host.embed_dim)
        mask = torch.arange(length) < length - 3
        with torch.no_grad(), _Largest() as largest:
            layer(x, mask.unsqueeze(0))
        found.append(largest.numel)
    return found[1] / found[0]
