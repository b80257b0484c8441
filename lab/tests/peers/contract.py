"""What the contract suite builds: small layers that still cross every chunk and block border."""

import torch

from lln_lab import peers

WIDTH, HEADS, MAX_LEN = 32, 2, 96

# A change that no norm over the features takes away.
UNEVEN = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)

# Sizes at which a system does at test length what it does at full length.
SMALL: dict[str, dict[str, object]] = {
    "nystromformer": {"landmarks": 8},
    "diag": {"block_size": 16},
    "window": {"window": 7},
    "pages": {"window": 3, "sinks": 2, "pages": 2, "page_size": 4},
    "lln_diag": {"block_size": 16},
    "lln_keys": {"block_size": 8, "keys": 6},
    "performer": {"features": 24},
    "rfa": {"features": 12, "pool": 8},
    "linformer": {"mixtures": 8},
    "skyformer": {"landmarks": 16},
    # T1 is tested as its upper layers, T2 as its lower; the other halves in their own file.
    "transnormer_t1": {"chunk": 16, "layer": 1, "layers": 2},
    "transnormer_t2": {"chunk": 16, "layer": 0, "layers": 2},
    "tnn": {"rpe_width": 16, "rpe_layers": 2},
    "flash": {"chunk": 16, "key_width": 8},
    "local_global": {"window": 16, "layer": 1, "layers": 3},
    "longformer": {"window": 16},
    "transformer_ls": {"window": 8, "landmarks": 4},
    "reformer": {"chunk": 8},
    "bigbird": {"block": 4, "random_blocks": 2},
    "blockwise": {"blocks": 3},
    "sinkhorn": {"block_size": 8},
    "routing": {"clusters": 4, "window": 8},
    "clustered": {"clusters": 6, "exact": 8, "tile": 4},
    "set_transformer": {"points": 4},
}

# Input scales beyond which a system's own equation is zero in float32, and its gradient with it.
SILENT_ABOVE: dict[str, float] = {
    # exp(−‖q − k‖²/2√d) without a row sum to divide by.
    "skyformer": 10.0,
}

# Causal systems that sort all tokens before they hide the later ones: a later token that moves in
# the order moves which earlier ones are looked at. Their hash does not change with the length of a
# vector, so later tokens are scaled, which changes all of them but their place in the order.
SORTS_ALL = ("reformer",)


# What a token 10⁴ times as large as the others may do to earlier rows in float32. No trace, but
# where one sum is over all tokens.
LEAKED_ROUNDING: dict[str, float] = {
    # A Fourier transform rounds all tokens alike, to the largest: 1e4 times 6e-8.
    "tnn": 2e-3,
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


def disturb(name, later):
    """Other tokens in the place of later ones, which a causal system must not notice."""
    return 2 * later if name in SORTS_ALL else later + UNEVEN


def some_padding(length=40, batch=2):
    """Sample 0 keeps every token, the others lose a tail."""
    mask = torch.ones(batch, length, dtype=torch.bool)
    for sample in range(1, batch):
        mask[sample, length - 7 * sample :] = False
    return mask


def bfloat16_budget(name):
    """Relative error, in the norm: systems that sort or hash on rounded numbers jump."""
    return {
        # A rounded token may change places with the last member of a cluster: one in twelve seeds.
        "routing": 0.15,
        # A rounded query may fall on the other side of a plane and so into another cluster.
        "clustered": 0.1,
        # A rounded query may find another page of two that are nearly as good.
        "pages": 0.15,
        # A token that rounds into another bucket moves all behind it in the list: up to 0.16 in
        # three seeds of twelve, 0.003 in the others.
        "reformer": 0.25,
    }.get(name, 0.03)
