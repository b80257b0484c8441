"""Longformer: a sliding window, and a few tokens that see and are seen by all.

Dimension legend: B batch, H heads, N tokens, D head width, G global tokens, w reach of the window.
"""

import torch
from torch import Tensor

from lln.checks import check_count
from lln.errors import InvalidInputError
from lln_lab.peers.band import Everywhere, band_attention
from lln_lab.peers.masked import attend
from lln_lab.peers.option_checks import check_window
from lln_lab.peers.peer import Card, Host, Mask, Peer, real_tokens, visible
from lln_lab.peers.projections import join_heads, split_heads, square_maps
from lln_lab.peers.token_blocks import pick, real_first


class Longformer(Peer):
    """Windowed softmax attention with global tokens.

        P_ij ∝ exp(q_i·k_j/√d),     |i − j| ≤ w or j global;
        P_ij ∝ exp(q^g_i·k^g_j/√d), every j, where i is global,

    the second with projections of its own, for keys and values too.

    Args:
        window: Tokens of the window, even; w is its half. 512 as published: nearly full attention
            where inputs have 512 tokens, so choose less there.
        global_tokens: How many of the first real tokens of a sequence are global. None: 1, the
            CLS token, and 0 where the host is causal, because a global token sees all.
    """

    card = Card(
        name="longformer",
        title="Longformer",
        kind="mixer",
        citation="Beltagy et al. 2020, arXiv 2004.05150",
        equation="P = softmax(QKᵀ/√d) over |i−j| ≤ w and global j; global rows over all j",
        complexity="O(N w d + N g d)",
        repeats_on_gpu=False,
        oracle="transformers LongformerSelfAttention; dense form",
        adds="query, key, value and output projections; three more for global tokens",
        departures="the first real token is global unless global_tokens says otherwise (published "
        "code takes a mask); any length, where published code wants a multiple of the window",
    )

    def __init__(self, host: Host, *, window: int = 512, global_tokens: int | None = None) -> None:
        super().__init__(host)
        check_window(window)
        if global_tokens is None:
            global_tokens = 0 if host.is_causal else 1
        check_count("global_tokens", global_tokens, least=0)
        if global_tokens and host.is_causal:
            raise InvalidInputError(
                "a global token sees later tokens; leave global_tokens 0 where is_causal=True."
            )
        self.reach, self.global_tokens = window // 2, global_tokens
        self.query, self.key, self.value, self.out = square_maps(host.embed_dim, 4)
        if global_tokens:
            maps = square_maps(host.embed_dim, 3)
            self.global_query, self.global_key, self.global_value = maps

    def mix(self, x: Tensor, key_mask: Mask) -> Tensor:
        if not self.global_tokens:
            return self.out(join_heads(self._local(x, key_mask, None)))
        key_mask = real_tokens(x, key_mask)
        places = real_first(key_mask)[:, : self.global_tokens]
        return self.attend(x, key_mask, places, key_mask.gather(1, places))

    def attend(self, x: Tensor, key_mask: Tensor, places: Tensor, valid: Tensor) -> Tensor:
        """Mix with global tokens that differ between samples.

        Args:
            x: ``[B, N, embed_dim]``.
            key_mask: bool ``[B, N]``, True = a real token.
            places: int64 ``[B, G]``, where the global tokens stand.
            valid: bool ``[B, G]``: samples with fewer than G have some False, at any place.

        Returns:
            ``[B, N, embed_dim]``.
        """
        is_global = torch.zeros_like(key_mask, dtype=torch.uint8)
        is_global = is_global.scatter_reduce(1, places, valid.byte(), "amax").bool()
        local = self._local(x, key_mask & ~is_global, (places, valid))
        few = x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        rows = self._global(few, x, key_mask)
        rows = torch.where(valid[:, None, :, None], rows, 0.0)
        where = places[:, None, :, None].expand_as(rows)
        spread = torch.zeros_like(local).scatter_add(2, where, rows.to(local.dtype))
        return self.out(join_heads(torch.where(is_global[:, None, :, None], spread, local)))

    def _local(self, x: Tensor, key_mask: Mask, chosen: tuple[Tensor, Tensor] | None) -> Tensor:
        query, key, value = (self._split(p(x)) for p in (self.query, self.key, self.value))
        everywhere = None
        if chosen is not None:
            places, valid = chosen
            few_keys, few_values = (pick(side, places.unsqueeze(1)) for side in (key, value))
            everywhere = Everywhere(few_keys, few_values, valid)
        reach, is_causal = self.reach, self.host.is_causal
        return band_attention(query, key, value, reach, key_mask, is_causal, everywhere)

    def _global(self, few: Tensor, x: Tensor, key_mask: Tensor) -> Tensor:
        """Rows ``[B, H, G, D]`` of the global tokens."""
        query = self._split(self.global_query(few))
        key, value = self._split(self.global_key(x)), self._split(self.global_value(x))
        return attend(query, key, value, visible(key, key_mask))

    def _split(self, tokens: Tensor) -> Tensor:
        return split_heads(tokens, self.host.num_heads)
