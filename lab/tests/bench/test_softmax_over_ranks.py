"""Ring attention and Ulysses, which context parallelism is compared with."""

import pytest
import torch
from lab.tests.bench.test_traffic import Counter, sure

from lln_lab.benchmarks import softmax_over_ranks as rivals
from lln_lab.benchmarks.traffic import LayerShape, layer_traffic


def softmax_over_ranks(group, rank, kind):
    """Bytes of a call of equal shards, its output and its gradients."""
    attend = getattr(rivals, f"{kind}_attention")
    sides, upstream = softmax_inputs()
    shards = [side.chunk(4, 2)[rank].clone().requires_grad_() for side in sides]
    with Counter(rank, group.size()) as forward:
        out = attend(*shards, group)
    with Counter(rank, group.size()) as backward:
        grads = torch.autograd.grad(out, shards, upstream.chunk(4, 2)[rank])
    return (forward.sent, backward.sent), [out.detach(), *grads]


def softmax_inputs():
    generator = torch.Generator().manual_seed(0)
    *sides, upstream = torch.randn(4, 2, 4, 24, 5, generator=generator, dtype=torch.float64)
    return sides, upstream


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_what_we_compare_with_is_softmax_and_sends_what_the_model_says(pool, kind):
    shape = LayerShape((6,) * 4, heads=4, width=5, batch=2, dtype=torch.float64)
    sides, upstream = softmax_inputs()
    sides = [side.requires_grad_() for side in sides]
    out = torch.nn.functional.scaled_dot_product_attention(*sides)
    expected = [out.detach(), *torch.autograd.grad(out, sides, upstream)]
    everyone = pool.run(softmax_over_ranks, 4, kind)
    for rank, (bytes_sent, _) in enumerate(everyone):
        assert bytes_sent == sure(layer_traffic(kind, shape, rank))
    for place, whole in enumerate(expected):
        found = torch.cat([parts[place] for _, parts in everyone], 2)
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
