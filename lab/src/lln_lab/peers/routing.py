"""Routing Transformer: tokens attend inside the clusters their directions fall into.

Dimension legend: B batch, H heads, N tokens, D head width, k clusters, w members of a cluster.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lln.checks import check_count
from lln.errors import InvalidInputError
from lln.precision import accumulation_dtype, without_autocast
from lln.tracing import is_compiling
from lln_lab.peers.band import band_attention
from lln_lab.peers.masked import attend
from lln_lab.peers.option_checks import check_number
from lln_lab.peers.peer import Card, Host, Mask, Peer, real_tokens
from lln_lab.peers.projections import join_heads, split_heads, square_maps


class Routing(Peer):
    """Half of the heads attend a window, the others the members of k learned clusters.

        u = LN(W_q x), no affine: queries and keys in one, on the sphere of radius √d
        members of centroid μ_c: the w = ⌈n/k⌉ tokens of largest u·μ_c, n real tokens
        O_i = mean over the clusters with i of Σ_j softmax_j(u_i·u_j/√d) v_j, j a member

    A token may be a member of several clusters: its outputs are averaged. A token of no cluster
    gets 0 from that head, as published: its residual carries it on. In training, after the use,

        μ_c ← λ μ_c + (1 − λ) · mean of u/√d over tokens nearest to μ_c, back on the unit sphere

    and centroids nobody is nearest to stay. They are a buffer, drawn at construction; eval mode
    changes nothing. Train with float32 weights (autocast is fine): in bfloat16 a step of
    1 − λ = 0.001 is lost in rounding.

    Args:
        clusters: k; None = ⌈√max_len⌉.
        window: Tokens to either side that a local head sees; None = ⌈max_len / k⌉.
        local_heads: How many heads are local, the first ones; None = half, rounded down.
        decay: λ.
    """

    centroids: Tensor
    previous: Tensor

    card = Card(
        name="routing",
        title="Routing Transformer",
        kind="mixer",
        citation="Roy et al. 2020, arXiv 2003.05997",
        equation="O_i = Σ_j softmax_j(u_i·u_j/√d) v_j over j in i's clusters, u = LN(W x)",
        complexity="O(N (k + N/k + window) d), O(N √N d) at k = √N",
        is_linear=False,
        causal=False,
        row_stochastic=False,
        repeats_on_gpu=False,
        random="centroids, once, at construction",
        adds="query, value and output projections, and keys of the local heads; centroids are a "
        "buffer of k·d per routing head",
        oracle="dense mask form",
        departures="A token sees itself as its paper's equation has it (the routing-transformer "
        "package hides it). Centroids start at random and are kept on the sphere; they follow the "
        "mean of their tokens, the paper's equation has the sum. No causal form: which tokens are "
        "a cluster's w nearest depends on later ones, so the paper's causal mask leaks.",
    )

    def __init__(
        self,
        host: Host,
        *,
        clusters: int | None = None,
        window: int | None = None,
        local_heads: int | None = None,
        decay: float = 0.999,
    ) -> None:
        super().__init__(host)
        heads, width = host.num_heads, host.head_dim
        self.clusters = math.isqrt(host.max_len - 1) + 1 if clusters is None else clusters
        check_count("clusters", self.clusters)
        self.window = -(-host.max_len // self.clusters) if window is None else window
        check_count("window", self.window)
        self.local_heads = heads // 2 if local_heads is None else local_heads
        check_count("local_heads", self.local_heads, least=0)
        if self.local_heads > heads:
            raise InvalidInputError(
                f"local_heads must be at most num_heads, {heads}, got {self.local_heads}."
            )
        check_number("decay", decay, lambda number: 0 <= number < 1, "in [0, 1)")
        self.decay = decay
        self.query, self.value, self.out = square_maps(host.embed_dim, 3)
        self.key = nn.Linear(host.embed_dim, self.local_heads * width) if self.local_heads else None
        start = torch.randn(heads - self.local_heads, self.clusters, width)
        self.register_buffer("centroids", F.normalize(start, dim=-1))
        # Those of the last training call, before it moved them.
        self.register_buffer("previous", self.centroids.clone(), persistent=False)

    def mix(self, x: Tensor, key_mask: Mask) -> Tensor:
        heads, local = self.host.num_heads, self.local_heads
        query, value = split_heads(self.query(x), heads), split_heads(self.value(x), heads)
        parts = []
        if self.key is not None:
            key = split_heads(self.key(x), local)
            near = query[:, :local], key, value[:, :local]
            parts.append(band_attention(*near, self.window, key_mask))
        if local < heads:
            parts.append(self._attend_clusters(query[:, local:], value[:, local:], key_mask))
        return self.out(join_heads(torch.cat(parts, dim=1)))

    def _attend_clusters(self, tokens: Tensor, value: Tensor, key_mask: Mask) -> Tensor:
        """``[B, H, N, D]`` of tokens (before the norm) and value."""
        batch, heads, length, width = tokens.shape
        with without_autocast(tokens):
            wide = accumulation_dtype(tokens.dtype)
            sphere = F.layer_norm(tokens.to(wide), (width,))
            member, is_member = self._members(sphere.detach(), real_tokens(tokens, key_mask))
            # Rows of one long list: selecting and adding rows can be made deterministic.
            first = torch.arange(batch * heads, device=tokens.device).view(batch, heads, 1, 1)
            rows = (first * length + member).flatten()

            def pick(side: Tensor) -> Tensor:
                picked = side.flatten(0, 2).index_select(0, rows)
                return picked.view(batch * heads, *member.shape[2:], width)

            sphere = sphere.to(value.dtype)
            seen = is_member.flatten(0, 1)
            # Without padding every place is taken, and the fastest kernels take no mask.
            allowed = None if key_mask is None else seen.unsqueeze(-2)
            together = pick(sphere)
            out = attend(together, together, pick(value), allowed).to(wide)
            share = seen.flatten().to(wide).unsqueeze(-1)
            total = out.new_zeros(batch * heads * length, width)
            total = total.index_add(0, rows, out.flatten(0, 2) * share)
            times = share.new_zeros(len(total), 1).index_add(0, rows, share)
            return (total / times.clamp_min(1.0)).view_as(value).to(value.dtype)

    @torch.no_grad()
    def _members(self, sphere: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Token of every place ``[B, H, k, w]`` in the clusters, and which places are taken."""
        length = sphere.shape[-2]
        unit = sphere / math.sqrt(sphere.shape[-1])
        # A checkpointed forward runs again inside the backward: it must find the same members.
        is_rerun = not is_compiling() and torch._C._current_graph_task_id() != -1
        centroids = self.previous if self.training and is_rerun else self.centroids
        nearness = centroids.to(unit.dtype) @ unit.mT
        hidden = ~real[:, None, None, :]
        places = -(-length // self.clusters)
        member = nearness.masked_fill(hidden, -math.inf).topk(places, dim=-1).indices
        # As many as the real length gives, so that padding adds no members.
        taken = (real.sum(-1) + self.clusters - 1) // self.clusters
        is_member = torch.arange(places, device=real.device) < taken[:, None, None, None]
        is_real = real[:, None, None, :].expand_as(nearness).gather(-1, member)
        if self.training and not is_rerun:
            self.previous.copy_(self.centroids)
            self._follow(nearness, unit, real)
        return member, is_member & is_real

    def _follow(self, nearness: Tensor, unit: Tensor, real: Tensor) -> None:
        """Move the centroids towards the mean of their nearest tokens."""
        cluster = torch.arange(self.clusters, device=unit.device)
        is_nearest = nearness.argmax(-2).unsqueeze(-1) == cluster
        nearest = (is_nearest & real[:, None, :, None]).to(unit.dtype)
        total = (nearest.mT @ unit).sum(0)
        count = nearest.sum((0, 2)).unsqueeze(-1)
        old = self.centroids.to(unit.dtype)
        moved = self.decay * old + (1.0 - self.decay) * total / count.clamp_min(1.0)
        self.centroids.copy_(torch.where(count > 0, F.normalize(moved, dim=-1), old))
