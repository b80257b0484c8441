"""What the contract suite builds: small layers that still cross every chunk and block border."""

import torch

from lln import peers

WIDTH, HEADS, MAX_LEN = 32, 2, 96

# Sizes at which a system does at test length what it does at full length.
SMALL: dict[str, dict[str, object]] = {
    "nystromformer": {"landmarks": 8},
    "local_global": {"window": 16, "layer": 1, "layers": 3},
    "longformer": {"window": 16},
    "transformer_ls": {"window": 8, "landmarks": 4},
    "reformer": {"chunk": 8},
    "bigbird": {"block": 4, "random_blocks": 2},
}

# Causal systems that sort all tokens before they hide the later ones: a later token that moves in
# the order moves which earlier ones are looked at. Their hash does not change with the length of a
# vector, so later tokens are scaled, which changes all of them but their place in the order.
SORTS_ALL = ("reformer",)


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


def disturb(name, later):
    """Other tokens in the place of later ones, which a causal system must not notice."""
    return 2 * later if name in SORTS_ALL else later + 1.0
