"""The encoder of `experiments.keys_training`: a kind of attention for every layer, all dense.

N×N masks and plain PyTorch on purpose: this measures what a form of attention learns, not how fast
a kernel for it would be. B sequences, N tokens, H heads, D features of a head, W tokens in a block,
K chosen keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Exact keys, by how they are chosen; see `choose`.
SELECTIONS = ("random", "block", "group", "query", "half")
KINDS = ("softmax", "diag", "shifted", "lln", *SELECTIONS)
# Queries that share their keys under "group".
GROUP = 16
INIT_STD = 0.02
# Spread of α·q and β·k at the start: about half of what entropy matching gives at unit variance.
SPREAD = 1.0


@dataclass(frozen=True)
class Variant:
    """A model by its name: ``A/B`` alternates, A in even layers; then options, each after a +.

    ``diag/half+conv+noslots+keys128``: `conv` adds a convolution over the values to every layer,
    `noslots` leaves the rest out, `keys128` overrides K.
    """

    kinds: tuple[str, ...]
    conv: bool = False
    slots: bool = True
    keys: int | None = None

    @classmethod
    def parse(cls, name: str) -> Variant:
        base, *extras = name.split("+")
        kinds = tuple(base.split("/"))
        keys = [int(extra[4:]) for extra in extras if extra[:4] == "keys" and extra[4:].isdigit()]
        known = {"conv", "noslots", *(f"keys{count}" for count in keys)}
        if not set(kinds) <= set(KINDS) or len(kinds) > 2 or not set(extras) <= known:
            raise SystemExit(f"{name!r}: give A or A/B of {KINDS}, then +conv, +noslots, +keys128")
        return cls(kinds, "conv" in extras, "noslots" not in extras, keys[-1] if keys else None)


@dataclass(frozen=True)
class Sizes:
    """What all layers share."""

    length: int = 512
    layers: int = 6
    width: int = 384
    heads: int = 6
    block: int = 64
    keys: int = 64
    vocabulary: int = 8192
    # Nats added to the closed form of the slots' offset; -4 starts them with little mass.
    slot_shift: float = 0.0
    # "dense" writes the logits out, "sdpa" leaves them inside a kernel: less memory.
    core: str = "dense"

    def __post_init__(self):
        if self.width % self.heads or self.length % self.block or self.length < 2 * self.block:
            raise SystemExit("heads must divide the width, and two blocks or more make the length")
        if self.block % GROUP or self.keys % 4:
            raise SystemExit(f"blocks are multiples of {GROUP}, keys are multiples of 4")


@cache
def once_compiled(function: Callable) -> Callable:
    """One for all layers: compiled again per kind, not per layer."""
    return torch.compile(function, dynamic=False)


# Choosing keys: bool [B, H, N, N], True = exact. Keys come as features [B, H, D, N].


def own_block(length: int, block: int, device: torch.device) -> Tensor:
    home = torch.arange(length, device=device) // block
    return home[:, None] == home


def mark_largest(scores: Tensor, count: int) -> Tensor:
    """True at the ``count`` largest entries of every row, in bfloat16; of equal ones the first.

    The count-th largest is found bit by bit. Compiled, that reads the scores once; `topk` takes
    many times as long on as many short rows.
    """
    length = scores.shape[-1]
    bits = scores.bfloat16().view(torch.int16).int()
    # Integers from 0 in the order of the numbers; the places make them all different.
    order = (bits ^ (bits >> 15 & 0x7FFF)) + 0x8000
    order = order * length + torch.arange(length - 1, -1, -1, dtype=torch.int32, device=bits.device)
    least = torch.zeros_like(order[..., :1])
    for power in reversed(range((0x10000 * length - 1).bit_length())):
        enough = (order >= least + 2**power).sum(-1, keepdim=True, dtype=torch.int32) >= count
        least = least + 2**power * enough.int()
    return order >= least


def by_groups(scores: Tensor, count: int, own: Tensor) -> Tensor:
    """One set of keys outside the block for every group of queries; scores [B, H, groups, N]."""
    size = own.shape[0] // scores.shape[2]
    # Groups lie inside a block, so a group's first query speaks for all.
    outside = scores.masked_fill(own[::size], -math.inf)
    return mark_largest(outside, count).repeat_interleave(size, dim=2)


def by_mean(q: Tensor, features: Tensor, count: int, size: int, own: Tensor) -> Tensor:
    """The keys with the largest product with the mean query of every ``size`` queries."""
    mean = q.unflatten(2, (-1, size)).mean(3)
    return by_groups(mean @ features, count, own)


def two_strongest(q: Tensor) -> Tensor:
    """[B, H, N, 2D]: True at the two largest of [q, −q], which are q's largest by size."""
    size = q.abs()
    places = torch.arange(q.shape[-1], device=q.device)
    first = places == size.argmax(-1, keepdim=True)
    second = places == size.masked_fill(first, -1.0).argmax(-1, keepdim=True)
    strongest = first | second
    return torch.cat([strongest & (q >= 0), strongest & (q < 0)], -1)


def by_features(q: Tensor, features: Tensor, count: int) -> Tensor:
    """For every query half of the keys by each of its two strongest features of [q, −q].

    A feature's keys are those where it is largest. Centring it over the tokens would not change
    their order, so it is left out. A key chosen twice counts once.
    """
    chosen = mark_largest(torch.cat([features, -features], 2), count // 2)
    # A product of zeros and ones: a gather that runs on the matrix units.
    return two_strongest(q).to(q.dtype) @ chosen.to(q.dtype) > 0.5


@torch.no_grad()
def choose(kind: str, q: Tensor, features: Tensor, keys: int, block: int) -> Tensor:
    """The keys that every query sees exactly, its own block among them. No gradient goes here."""
    length = q.shape[2]
    own = own_block(length, block, q.device)
    most = length - block
    if kind == "random":
        shape = (*q.shape[:2], length // block, length)
        return own | by_groups(torch.rand(shape, device=q.device), min(keys, most), own)
    if kind == "block":
        return own | by_mean(q, features, min(keys, most), block, own)
    if kind == "group":
        return own | by_mean(q, features, min(keys, most), GROUP, own)
    if kind == "query":
        return own | by_features(q, features, min(keys, 2 * length))
    shared = by_mean(q, features, min(keys // 2, most), block, own)
    return own | shared | by_features(q, features, min(keys // 2, 2 * length))


# One softmax


def dense_core(q, k, v, keep, rest=None, centroid=None):
    """Softmax over the kept keys and the slots, whose logits are ``rest`` [B, H, N, D].

    Both parts are divided by their common sum at the end: no row of both is ever written.
    """
    logits = ((q * q.shape[-1] ** -0.5) @ k.mT).masked_fill(~keep, -math.inf)
    top = logits.detach().amax(-1, keepdim=True).float()
    if rest is not None:
        top = torch.maximum(top, rest.detach().amax(-1, keepdim=True))
    weights = (logits - top).exp()
    mixed, mass = weights.to(v.dtype) @ v, weights.sum(-1, keepdim=True)
    if rest is not None:
        weights = (rest - top).exp()
        mixed = mixed + weights.to(v.dtype) @ centroid.to(v.dtype)
        mass = mass + weights.sum(-1, keepdim=True)
    return (mixed / mass).to(v.dtype)


def summarise(k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Log-mass [B, H, D] and centroids [B, H, D, D] of LLN's slots, over all tokens."""
    exponent = beta * k.float()
    return exponent.logsumexp(2), exponent.softmax(2).to(v.dtype).mT @ v


def log_share(keep: Tensor) -> Tensor:
    """ln of the share of tokens that are not exact [B, H, N, 1]; −inf where all are."""
    return (1 - keep.sum(-1, keepdim=True) / keep.shape[-1]).log()


def sdpa_core(q, k, v, keep, share, alpha, bias, centre, centroid):
    """`dense_core` inside a kernel: slots are D more keys.

    A slot's key is the mean key plus α√D times a unit vector, and a feature that is 1 in every
    query carries its bias [B, H, D]; only constants go into the mask, which so needs no gradient.
    """
    width = q.shape[-1]
    # Eight, not one: the kernel reads rows in pieces of 16 bytes.
    extra = F.pad(torch.ones_like(q[..., :1]), (0, 7))
    slots = alpha * width**0.5 * torch.eye(width, device=q.device) + centre
    slots = torch.cat([slots, F.pad(bias.unsqueeze(-1) * width**0.5, (0, 7))], -1)
    mask = torch.zeros_like(keep, dtype=q.dtype).masked_fill_(~keep, -math.inf)
    mask = torch.cat([mask, share.to(q.dtype).expand(*keep.shape[:3], width)], -1)
    return F.scaled_dot_product_attention(
        torch.cat([q, extra], -1),
        torch.cat([F.pad(k, (0, 8)), slots.to(k.dtype)], 2),
        torch.cat([v, centroid.to(v.dtype)], 2),
        attn_mask=mask,
        scale=width**-0.5,
    )


# Diagonal blocks: here q, k, v are [B, N, H, D], so that cutting them into blocks copies nothing


def in_blocks(q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
    parts = (x.unflatten(1, (-1, block)).flatten(0, 1).transpose(1, 2) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2)
    return mixed.unflatten(0, (q.shape[0], -1)).flatten(1, 2)


def in_shifted_blocks(q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
    """Blocks that begin in the middle of others; half a block at either end, nothing wraps."""
    half = block // 2

    def part(cut: slice, size: int) -> Tensor:
        return in_blocks(q[:, cut], k[:, cut], v[:, cut], size)

    ends = part(slice(None, half), half), part(slice(-half, None), half)
    return torch.cat([ends[0], part(slice(half, -half), block), ends[1]], 1)


def convolve(v: Tensor, weight: Tensor) -> Tensor:
    """Depthwise convolution over the tokens; sums of shifts, as cuDNN's is slow backwards."""
    reach = weight.shape[0] // 2
    padded = F.pad(v, (0, 0, reach, reach))
    shifts = [padded[:, place : place + v.shape[1]] for place in range(weight.shape[0])]
    return sum(shift * row for shift, row in zip(shifts, weight.to(v.dtype), strict=True))


class Attention(nn.Module):
    """One layer's attention. Learned for the slots, per head: α, β and the offset g."""

    def __init__(self, sizes: Sizes, kind: str, variant: Variant):
        super().__init__()
        self.sizes, self.kind = sizes, kind
        self.keys = variant.keys or sizes.keys
        self.has_slots = kind in SELECTIONS and variant.slots
        self.project = nn.Linear(sizes.width, 3 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)
        # Zero: the start is the one without it.
        self.conv = nn.Parameter(torch.zeros(5, sizes.width)) if variant.conv else None
        deviation = INIT_STD * sizes.width**0.5
        if kind == "lln" or self.has_slots:
            start = torch.full((sizes.heads, 1, 1), SPREAD / deviation)
            self.alpha, self.beta = nn.Parameter(start), nn.Parameter(start.clone())
        if self.has_slots:
            # g = p/2 − ln D − s², with the variance that the initial weights give.
            offset = deviation**4 / 2 - math.log(sizes.width // sizes.heads) - SPREAD**2
            self.offset = nn.Parameter(torch.full((sizes.heads, 1), offset + sizes.slot_shift))

    def attend_keys(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        if not self.has_slots:
            return dense_core(q, k, v, keep)
        # Slots are those of centred keys; q·μ/√D puts them beside keys that are not centred.
        centre = k.mean(2, keepdim=True)
        log_mass, centroid = summarise(k - centre, v, self.beta)
        bias = log_mass + self.offset
        if self.sizes.core == "sdpa":
            return sdpa_core(q, k, v, keep, log_share(keep), self.alpha, bias, centre, centroid)
        level = (q @ centre.mT) * q.shape[-1] ** -0.5
        rest = self.alpha * q + level + bias.unsqueeze(2) + log_share(keep)
        return dense_core(q, k, v, keep, rest, centroid)

    def keep(self, q: Tensor, k: Tensor, compiled: bool = False) -> Tensor | None:
        """The exact keys of q, k [B, N, H, D]; None for kinds that choose none."""
        if self.kind not in SELECTIONS:
            return None
        # In order in memory: a feature of all tokens is read at once.
        features = k.permute(0, 2, 3, 1).contiguous()
        chooser = once_compiled(choose) if compiled else choose
        return chooser(self.kind, q.transpose(1, 2), features, self.keys, self.sizes.block)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        """Attention of q, k, v [B, N, H, D]; the same shape."""
        if self.kind == "diag":
            return in_blocks(q, k, v, self.sizes.block)
        if self.kind == "shifted":
            return in_shifted_blocks(q, k, v, self.sizes.block)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.kind == "softmax":
            mixed = F.scaled_dot_product_attention(q, k, v)
        elif self.kind == "lln":
            log_mass, centroid = summarise(k, v, self.beta)
            weights = (self.alpha * q + log_mass.unsqueeze(2)).softmax(-1)
            mixed = weights.to(v.dtype) @ centroid
        else:
            mixed = self.attend_keys(q, k, v, keep)
        return mixed.transpose(1, 2)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v, each [B, N, H, D]."""
        return self.project(x).unflatten(-1, (3, self.sizes.heads, -1)).unbind(2)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        # Autocast would turn every softmax into float32 tensors of N×N; those of a bfloat16 input
        # compute in float32 anyway.
        with torch.autocast(q.device.type, enabled=False):
            mixed = self.mix(q, k, v, keep).flatten(2)
            if self.conv is not None:
                mixed = mixed + convolve(v.flatten(2), self.conv)
        return self.out(mixed)


class Layer(nn.Module):
    """Pre-norm: attention, then a GELU network four times as wide."""

    def __init__(self, sizes: Sizes, kind: str, variant: Variant):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(sizes.width) for _ in range(2)])
        self.attention = Attention(sizes, kind, variant)
        self.up = nn.Linear(sizes.width, 4 * sizes.width)
        self.down = nn.Linear(4 * sizes.width, sizes.width)

    def before(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.attention.split(self.norms[0](x))

    def after(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        x = x + self.attention(q, k, v, keep)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))

    def forward(self, x: Tensor, compiled: bool = False) -> Tensor:
        """Choosing is compiled apart: together with the rest, gradients in bfloat16 were NaN.

        (Inductor of torch 2.13 on a CPU; the same graph without its code generation was right.)
        """
        before, after = Layer.before, Layer.after
        if compiled:
            before, after = once_compiled(before), once_compiled(after)
        q, k, v = before(self, x)
        return after(self, x, q, k, v, self.attention.keep(q, k, compiled))


class Encoder(nn.Module):
    """Masked language model: learned positions, output weights tied to the embeddings."""

    def __init__(self, sizes: Sizes, variant: Variant, compiled: bool = False):
        super().__init__()
        self.compiled = compiled
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Parameter(torch.empty(sizes.length, sizes.width))
        kinds = [variant.kinds[depth % len(variant.kinds)] for depth in range(sizes.layers)]
        self.layers = nn.ModuleList([Layer(sizes, kind, variant) for kind in kinds])
        self.norm = nn.LayerNorm(sizes.width)
        self.bias = nn.Parameter(torch.zeros(sizes.vocabulary))
        self.start(sizes.layers)

    def start(self, layers: int) -> None:
        """Draw the weights; the same ones for every variant, as only shared parts are random."""
        nn.init.normal_(self.positions, std=INIT_STD)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                into_stream = name.endswith((".out", ".down"))
                nn.init.normal_(module.weight, std=INIT_STD / (2 * layers) ** (into_stream / 2))
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor, places: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions
        for layer in self.layers:
            x = layer(x, self.compiled)
        loss = once_compiled(Encoder.loss) if self.compiled else Encoder.loss
        return loss(self, x, places, targets)

    def loss(self, x: Tensor, places: Tensor, targets: Tensor) -> Tensor:
        """Mean loss at the masked places [B, M] only; the rest never reaches the output layer."""
        at_masks = x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        logits = F.linear(self.norm(at_masks), self.tokens.weight) + self.bias
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
