"""Improved clustered attention: queries share their cluster's row but for its largest entries.

Dimension legend: B batch, H heads, N tokens, D head width, C clusters, t exact keys, T tokens of a
tile.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.precision import accumulation_dtype
from lln_lab.peers.masked import attend, softmax_matrix
from lln_lab.peers.option_checks import check_counts
from lln_lab.peers.peer import Card, Host, Mask, WideCore, real_tokens, visible, zero_padding
from lln_lab.peers.token_blocks import pick, real_first


class Clustered(WideCore):
    """i-clustered attention: one row per cluster, its largest entries again for every query.

        A^c = softmax(Q^c Kᵀ/√d), Q^c the mean query of each cluster
        m_c = Σ A^c_cl over the t keys l of largest A^c_cl
        A_il = m_c exp(q_i·k_l/√d) / Σ_r exp(q_i·k_r/√d) for those keys (r runs over them)
        A_il = A^c_cl for all others, c the cluster of i

    Queries are clustered by K-means under the Hamming distance of the signs of random projections.
    The K-means starts at queries evenly spaced among the real ones, breaks ties towards the first
    centroid (of votes: towards +1), and so is a function of its input; no gradient passes it.

    Args:
        clusters: C.
        exact: t.
        bits: How many projections.
        iterations: Of the K-means.
        tile: Queries of one cluster that are multiplied with its exact keys at once; changes the
            time it takes, not the result.
    """

    planes: Tensor

    card = Card(
        name="clustered",
        title="Improved clustered attention",
        citation="Vyas et al. 2020, arXiv 2007.04825",
        equation="A_il = m_c softmax_l(q_i·k_l/√d) on the top t keys of i's cluster c, else "
        "softmax_l(q^c·k_l/√d)",
        complexity="O(N (C + t) d + N C bits · iterations)",
        causal=False,
        repeats_on_gpu=False,
        random="projections of the hash, once, at construction",
        adds="none; the projections are a buffer of bits·d",
        departures="Its code draws the K-means' first centroids and gives the hash a bias; here "
        "they are evenly spaced queries and there is none.",
    )

    def __init__(
        self,
        host: Host,
        *,
        clusters: int = 100,
        exact: int = 32,
        bits: int = 63,
        iterations: int = 10,
        tile: int = 32,
    ) -> None:
        super().__init__(host)
        self.clusters, self.exact, self.bits = clusters, exact, bits
        self.iterations, self.tile = iterations, tile
        check_counts(clusters=clusters, exact=exact, bits=bits, iterations=iterations, tile=tile)
        self.register_buffer("planes", torch.randn(bits, host.head_dim))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask) -> Tensor:
        group = self.groups(query, key_mask)
        coarse = self._coarse(query, key, key_mask, group)
        top = coarse.topk(min(self.exact, key.shape[-2]), dim=-1)
        shared = coarse.scatter(-1, top.indices, 0.0) @ value
        mass = top.values.sum(-1, keepdim=True)
        own = self._exact(query, key, value, key_mask, group, top.indices)
        return pick(shared, group) + pick(mass, group) * own

    def matrix(self, query: Tensor, key: Tensor, key_mask: Mask = None) -> Tensor:
        wide = accumulation_dtype(query.dtype)
        query, key = query.to(wide), key.to(wide)
        group = self.groups(query, key_mask)
        rows = pick(self._coarse(query, key, key_mask, group), group)
        top = rows.topk(min(self.exact, key.shape[-2]), dim=-1).indices
        is_exact = torch.zeros_like(rows, dtype=torch.bool).scatter(-1, top, True)
        mass = torch.where(is_exact, rows, 0.0).sum(-1, keepdim=True)
        exact = softmax_matrix(query, key, visible(key, key_mask, among=is_exact))
        return torch.where(is_exact, mass * exact, rows)

    @torch.no_grad()
    def groups(self, query: Tensor, key_mask: Mask) -> Tensor:
        """The cluster ``[B, H, N]`` of every query; masked ones are given one and move none."""
        batch, heads = query.shape[:2]
        real = real_tokens(query, key_mask)
        signs = torch.where(query @ self.planes.to(query.dtype).mT >= 0, 1.0, -1.0)
        # One more bit that all have. Its product with −c/C breaks ties between agreements, which
        # are whole numbers, in favour of the first centroid; its votes count the members.
        signs = F.pad(signs, (0, 1), value=1.0)
        step = torch.arange(self.clusters, device=query.device)
        start = real_first(real).gather(-1, step * real.sum(-1, keepdim=True) // self.clusters)
        rank = (step / -self.clusters).unsqueeze(-1).expand(batch, heads, -1, 1)
        centroids = torch.cat((pick(signs, start.unsqueeze(1))[..., :-1], rank), dim=-1)
        first = torch.arange(batch * heads, device=query.device).view(batch, heads, 1)
        voting = (signs * real[:, None, :, None]).flatten(0, 2)
        votes = voting.new_zeros(batch * heads * self.clusters, self.bits + 1)
        for _ in range(self.iterations):
            rows = (first * self.clusters + _nearest(signs, centroids)).flatten()
            # Whole numbers add up to the same in any order, on a GPU too.
            found = votes.index_add(0, rows, voting).view_as(centroids)
            bits = torch.where(found[..., :-1] >= 0, 1.0, -1.0)
            moved = torch.cat((bits, rank), dim=-1)
            centroids = torch.where(found[..., -1:] > 0, moved, centroids)
        return _nearest(signs, centroids)

    def _coarse(self, query: Tensor, key: Tensor, key_mask: Mask, group: Tensor) -> Tensor:
        """A^c ``[B, H, C, N]`` of the mean real query of every cluster."""
        member = group.unsqueeze(-1) == torch.arange(self.clusters, device=group.device)
        member = zero_padding(member.to(query.dtype), key_mask)
        totals = member.mT @ zero_padding(query, key_mask)
        centroid = totals / member.sum(-2).clamp_min(1.0).unsqueeze(-1)
        return softmax_matrix(centroid, key, visible(key, key_mask))

    def _exact(
        self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask, group: Tensor, top: Tensor
    ) -> Tensor:
        """Softmax attention ``[B, H, N, D]`` of every query to the keys top ``[B, H, C, t]``.

        Queries are sorted by cluster into tiles of one cluster each, so that a cluster's keys are
        fetched once per tile and not once per query.
        """
        slot, source, tile_group = self._tiles(group)
        tiles = pick(query, source)
        index = pick(top, tile_group)
        keys, values = (
            pick(side, index.flatten(2)).unflatten(2, index.shape[2:]).flatten(0, 1)
            for side in (key, value)
        )
        seen = None
        if key_mask is not None:
            seen = key_mask[:, None].expand(-1, query.shape[1], -1).gather(2, index.flatten(2))
            seen = seen.view_as(index).flatten(0, 1).unsqueeze(-2)
        out = attend(tiles.unflatten(2, (-1, self.tile)).flatten(0, 1), keys, values, seen)
        return pick(out.reshape(tiles.shape), slot)

    def _tiles(self, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The slot of every query, the query of every slot, the cluster of every tile.

        ``[B, H, N]``, ``[B, H, tiles·T]``, ``[B, H, tiles]``; tiles = N // T + C suffice whatever
        the clusters' sizes. An empty slot repeats query 0 and is never read.
        """
        tokens, device = group.shape[-1], group.device
        count = group.new_zeros(*group.shape[:-1], self.clusters)
        count = count.scatter_add(-1, group, torch.ones_like(group))
        ends = (-(-count // self.tile)).cumsum(-1)
        first_slot = torch.cat((torch.zeros_like(ends[..., :1]), ends[..., :-1]), -1) * self.tile
        order = group.argsort(dim=-1, stable=True)
        sorted_group = group.gather(-1, order)
        before = (count.cumsum(-1) - count).gather(-1, sorted_group)
        sorted_slot = first_slot.gather(-1, sorted_group) + (
            torch.arange(tokens, device=device) - before
        )
        tiles = tokens // self.tile + self.clusters
        slot = torch.empty_like(group).scatter(-1, order, sorted_slot)
        source = group.new_zeros(*group.shape[:-1], tiles * self.tile)
        source = source.scatter(-1, sorted_slot, order)
        tile = torch.arange(tiles, device=device).expand(*group.shape[:-1], -1).contiguous()
        tile_group = torch.searchsorted(ends, tile, right=True).clamp_max(self.clusters - 1)
        return slot, source, tile_group


def _nearest(signs: Tensor, centroids: Tensor) -> Tensor:
    """The centroid ``[B, H, N]`` that agrees with most bits of each query."""
    # Not argmax, which takes thrice the time on a CPU.
    return (signs @ centroids.mT).max(-1).indices
