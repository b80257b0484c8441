"""What the further families of the paper's section 2.2 owe together: autocast, memory, refusal."""

import copy

import pytest
import torch
from lab.tests.peers.contract import bfloat16_budget, build, some_padding, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from lln.errors import InvalidInputError
from lln_lab import peers

NAMES = (
    "sparse_transformer",
    "blockwise",
    "synthesizer",
    "sinkhorn",
    "routing",
    "clustered",
    "set_transformer",
    "axial",
)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_autocast(name, given):
    """A float32 layer under autocast, behind another layer's float32 or bfloat16 output."""
    layer, mask = build(name, dtype=torch.float32).train(), some_padding()
    # Noise of the training mode would hide the comparison.
    quiet = copy.deepcopy(layer).eval()
    x = tokens(dtype=torch.float32).to(given)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x, mask).float().sum().backward()
        found = quiet(x, mask).float()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    expected = quiet(x.float(), mask)
    assert (found - expected).norm() / expected.norm() < bfloat16_budget(name)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, views included."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.size = max(self.size, tensor.numel())
        return out


@pytest.mark.parametrize(
    ("name", "power", "options"),
    [
        ("sparse_transformer", 1.5, {}),
        ("sparse_transformer", 1.5, {"pattern": "fixed", "summary": 2}),
        ("routing", 1.5, {"clusters": None, "window": None}),
        ("axial", 1.5, {}),
        ("clustered", 1.0, {"tile": 16}),
        ("set_transformer", 1.0, {}),
        ("sinkhorn", 1.0, {"block_size": 16}),
    ],
)
def test_the_largest_tensor_grows_as_the_card_says(name, power, options):
    sizes = []
    for length in (256, 1024):
        layer = build(name, max_len=length, num_heads=1, dtype=torch.float32, **options)
        largest = Largest()
        with largest, torch.no_grad():
            layer(tokens(batch=1, length=length, dtype=torch.float32))
        sizes.append(largest.size)
    assert sizes[1] <= 1.05 * 4**power * sizes[0]
    assert sizes[1] < 1024 * 1024 / 2


def test_the_refusal_of_the_compressive_transformer_says_why_and_what_else():
    assert "compressive" not in peers.available()
    for ask in (
        lambda: peers.card("compressive"),
        lambda: peers.build("compressive", embed_dim=8, num_heads=2, max_len=4),
        lambda: peers.build("compressive", embed_dim=8, num_heads=2, max_len=4, is_causal=True),
    ):
        with pytest.raises(InvalidInputError) as refusal:
            ask()
        sentence = str(refusal.value)
        for part in ("causal language model", "memory", "encoder", "lln_lab.peers.available()"):
            assert part in sentence
