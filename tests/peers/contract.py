"""What the contract suite builds: small layers that still cross every chunk and block border."""

import torch

from lln import peers

WIDTH, HEADS, MAX_LEN = 32, 2, 96

# Sizes at which a system does at test length what it does at full length.
SMALL: dict[str, dict[str, object]] = {
    "nystromformer": {"landmarks": 8},
    "blockwise": {"blocks": 3},
    "sinkhorn": {"block_size": 8},
    "routing": {"clusters": 4, "window": 8},
    "clustered": {"clusters": 6, "exact": 8, "tile": 4},
    "set_transformer": {"points": 4},
}


def build(name, seed=0, **changes):
    """The system in eval mode, in float64 unless changed, with weights that do something."""
    dtype = changes.pop("dtype", torch.float64)
    torch.manual_seed(seed)
    options = {"embed_dim": WIDTH, "num_heads": HEADS, "max_len": MAX_LEN}
    layer = peers.build(name, **{**options, **SMALL.get(name, {}), **changes})
    return layer.to(dtype).eval()


def tokens(batch=2, length=40, seed=1, scale=1.0, dtype=torch.float64):
    """Random token vectors."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(batch, length, WIDTH, generator=generator, dtype=dtype)).to(dtype)
