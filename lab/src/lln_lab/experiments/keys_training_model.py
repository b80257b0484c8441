"""The encoder of `keys_training`: a kind of attention for every layer, all dense.

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

from lln_lab.experiments.keys_training_choice import GROUP, SELECTIONS, choose

KINDS = ("softmax", "diag", "shifted", "lln", *SELECTIONS)
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
class ModelSizes:
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


# One softmax


class Numerators(torch.autograd.Function):
    """exp(logits − their maximum) in ``dtype``, its sum and that maximum along ``dim``.

    As a function of its own it keeps nothing else for its gradient, which needs no mask: what is
    not exact is 0.
    """

    @staticmethod
    def forward(ctx, logits, exact, dim, dtype):
        ctx.given = logits.dtype
        if exact is not None:
            logits = logits.masked_fill(~exact, -math.inf)
        logits = logits.float()
        # Finite also where all are −inf: slots when every key is exact.
        top = logits.amax(dim, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
        weights = (logits - top).exp()
        rounded = weights.to(dtype)
        ctx.save_for_backward(rounded)
        return rounded, weights.sum(dim, keepdim=True), top

    @staticmethod
    def backward(ctx, grad_weights, grad_mass, _):
        (weights,) = ctx.saved_tensors
        return (weights * (grad_weights + grad_mass)).to(ctx.given), None, None, None


def dense_core(q, k, v, keep, rest=None, centroid=None):
    """Softmax over the kept keys and the slots, whose logits are ``rest`` [B, H, N, D].

    Both parts are divided by their common sum at the end: no row of both is ever written.
    """
    logits = ((q * q.shape[-1] ** -0.5) @ k.mT).unflatten(2, (keep.shape[2], -1))
    parts = Numerators.apply(logits, keep.unsqueeze(3) != 0, -1, v.dtype)
    weights, mass, top = (part.flatten(2, 3) for part in parts)
    mixed = weights @ v
    if rest is not None:
        weights, rest_mass, rest_top = Numerators.apply(rest, None, -1, v.dtype)
        # Constants: each part is right whatever was taken off its logits.
        apart = (top - rest_top).detach()
        scale, rest_scale = apart.clamp(max=0).exp(), (-apart).clamp(max=0).exp()
        mixed = mixed * scale + (weights @ centroid) * rest_scale
        mass = mass * scale + rest_mass * rest_scale
    return (mixed / mass).to(v.dtype)


def summarise(k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Log-mass [B, H, D] and centroids [B, H, D, D] of LLN's slots, over all tokens."""
    weights, mass, top = Numerators.apply(beta * k.float(), None, 2, v.dtype)
    centroid = (weights.mT @ v) / mass.mT
    return (top.detach() + mass.log()).squeeze(2), centroid.to(v.dtype)


def for_every_query(rows: Tensor, length: int) -> Tensor:
    return rows.repeat_interleave(length // rows.shape[2], dim=2)


def log_share(keep: Tensor) -> Tensor:
    """Ln of the share of tokens that are not exact [B, H, N, 1]; −inf where all are."""
    length = keep.shape[-1]
    exact = (keep != 0).sum(-1, keepdim=True, dtype=torch.int32)
    return for_every_query((1 - exact / length).log(), length)


def sdpa_core(q, k, v, keep, share, alpha, bias, centre, centroid):
    """`dense_core` inside a kernel: slots are D more keys.

    A slot's key is the mean key plus α√D times a unit vector, and a feature that is 1 in every
    query carries its bias [B, H, D]; only constants go into the mask, which so needs no gradient.
    """
    length, width = q.shape[2:]
    # Eight, not one: the kernel reads rows in pieces of 16 bytes.
    extra = F.pad(torch.ones_like(q[..., :1]), (0, 7))
    slots = alpha * width**0.5 * torch.eye(width, device=q.device) + centre
    slots = torch.cat([slots, F.pad(bias.unsqueeze(-1) * width**0.5, (0, 7))], -1)
    mask = torch.zeros_like(keep, dtype=q.dtype).masked_fill_(keep == 0, -math.inf)
    mask = for_every_query(mask, length)
    mask = torch.cat([mask, share.to(q.dtype).expand(-1, -1, -1, width)], -1)
    return F.scaled_dot_product_attention(
        torch.cat([q, extra], -1),
        torch.cat([F.pad(k, (0, 8)), slots.to(k.dtype)], 2),
        torch.cat([v, centroid], 2),
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

    def __init__(self, sizes: ModelSizes, kind: str, variant: Variant):
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

    @torch.no_grad()
    def keep(self, qkv: Tensor, compiled: bool = False) -> Tensor:
        """The exact keys of qkv [B, N, 3, H, D]."""
        q, k, _ = qkv.unbind(2)
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

    def forward(self, qkv: Tensor, keep: Tensor | None) -> Tensor:
        q, k, v = qkv.unbind(2)
        # Autocast would turn every softmax into float32 tensors of N×N; those of a bfloat16 input
        # compute in float32 anyway.
        with torch.autocast(q.device.type, enabled=False):
            mixed = self.mix(q, k, v, keep).flatten(2)
            if self.conv is not None:
                mixed = mixed + convolve(v.flatten(2), self.conv)
        return self.out(mixed)


class Layer(nn.Module):
    """Pre-norm: attention, then a GELU network four times as wide."""

    def __init__(self, sizes: ModelSizes, kind: str, variant: Variant):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(sizes.width) for _ in range(2)])
        self.attention = Attention(sizes, kind, variant)
        self.up = nn.Linear(sizes.width, 4 * sizes.width)
        self.down = nn.Linear(4 * sizes.width, sizes.width)

    def before(self, x: Tensor) -> Tensor:
        """q, k, v in one [B, N, 3, H, D]: their gradients are written as one, too."""
        qkv = self.attention.project(self.norms[0](x))
        return qkv.unflatten(-1, (3, self.attention.sizes.heads, -1))

    def after(self, x: Tensor, qkv: Tensor, keep: Tensor | None) -> Tensor:
        x = x + self.attention(qkv, keep)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))

    def whole(self, x: Tensor) -> Tensor:
        return self.after(x, self.before(x), None)

    def forward(self, x: Tensor, compiled: bool = False) -> Tensor:
        """Choosing is compiled apart: together with the rest, gradients in bfloat16 were NaN.

        (Inductor of torch 2.13 on a CPU; the same graph without its code generation was right.)
        """
        parts = Layer.before, Layer.after, Layer.whole
        before, after, whole = map(once_compiled, parts) if compiled else parts
        if self.attention.kind not in SELECTIONS:
            return whole(self, x)
        qkv = before(self, x)
        return after(self, x, qkv, self.attention.keep(qkv, compiled))


class MaskedEncoder(nn.Module):
    """Masked language model: learned positions, output weights tied to the embeddings."""

    def __init__(self, sizes: ModelSizes, variant: Variant, compiled: bool = False):
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
        loss = once_compiled(MaskedEncoder.loss) if self.compiled else MaskedEncoder.loss
        return loss(self, x, places, targets)

    def loss(self, x: Tensor, places: Tensor, targets: Tensor) -> Tensor:
        """Mean loss at the masked places [B, M] only; the rest never reaches the output layer."""
        at_masks = x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        logits = F.linear(self.norm(at_masks), self.tokens.weight) + self.bias
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
