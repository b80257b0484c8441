"""Linformer: softmax attention to k learned mixtures of the tokens.

Dimension legend: B batch, H heads, N tokens, D head width, k mixtures, G H or 1.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lln.checks import check_count
from lln.checks.names import check_choice
from lln.errors import InvalidInputError
from lln.precision import accumulation_dtype
from lln_lab.peers.peer import Card, Core, Host, Mask, zero_padding

SHARING = ("none", "headwise", "key_value")


class Linformer(Core):
    """O = softmax(Q (EᵀK)ᵀ/√d) FᵀV, Eq. (7), with E and F learned for every position.

    Shorter inputs use the first rows of E and F; padded tokens enter the mixtures as zeros.

    Args:
        host: Sizes and place; E and F have ``host.max_len`` rows.
        mixtures: k.
        shared: ``"none"``: E and F of every head's own. ``"headwise"``, the default: one E and one
            F for all heads. ``"key_value"``: one E for all heads, and F = E.
        compat: ``"skyformer"``: as in Skyformer's LRA code, where every head has one E that keys
            and values share, drawn from N(0, 0.02²) and by mistake never trained; `shared` must
            then be left alone.
    """

    card = Card(
        name="linformer",
        title="Linformer",
        citation="Wang et al. 2020, arXiv 2006.04768",
        equation="O = softmax(Q(EᵀK)ᵀ/√d) FᵀV, E, F: max_len × k",
        complexity="O(N k d)",
        causal=False,
        row_stochastic=False,
        repeats_on_gpu=False,
        needs_max_len=True,
        adds="2·max_len·k (headwise; times heads if not shared, half if key_value)",
        oracle="linformer LinformerSelfAttention; dense form",
        departures="compat='skyformer' has the untrained E of the LRA tables. Sharing between "
        "layers is not offered: a layer is built alone.",
    )

    def __init__(
        self,
        host: Host,
        *,
        mixtures: int = 128,
        shared: Literal["none", "headwise", "key_value"] | None = None,
        compat: Literal["skyformer"] | None = None,
    ) -> None:
        super().__init__(host)
        check_count("mixtures", mixtures)
        check_choice("compat", compat, (None, "skyformer"))
        if shared is not None:
            check_choice("shared", shared, SHARING)
        if compat and shared:
            raise InvalidInputError("compat='skyformer' fixes what is shared; leave shared out.")
        sides = 1 if compat or shared == "key_value" else 2
        groups = host.num_heads if compat or shared == "none" else 1
        # First axis: E and F, or one that is both.
        drawn = torch.empty(sides, groups, host.max_len, mixtures)
        if compat:
            self.register_buffer("projections", drawn.normal_(std=0.02))
        else:
            bound = mixtures**-0.5
            self.projections = nn.Parameter(drawn.uniform_(-bound, bound))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask = None) -> Tensor:
        for_keys, for_values = self._sides(key)
        key, value = zero_padding(key, key_mask), zero_padding(value, key_mask)
        few_keys = torch.einsum("hnk,bhnd->bhkd", for_keys, key)
        few_values = torch.einsum("hnk,bhnd->bhkd", for_values, value)
        return F.scaled_dot_product_attention(query.to(few_keys.dtype), few_keys, few_values)

    def matrix(self, query: Tensor, key: Tensor, key_mask: Mask = None) -> Tensor:
        """P = softmax(Q(EᵀK)ᵀ/√d) Fᵀ."""
        wide = accumulation_dtype(query.dtype)
        for_keys, for_values = (side.to(wide) for side in self._sides(key))
        key, for_values = zero_padding(key, key_mask), zero_padding(for_values[None], key_mask)
        scores = query.to(wide) @ (for_keys.mT @ key.to(wide)).mT / query.shape[-1] ** 0.5
        return scores.softmax(-1) @ for_values.mT

    def _sides(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """E and F for these tokens, each ``[G, N, k]``."""
        rows = self.projections[:, :, : key.shape[-2]].to(key.dtype)
        return rows[0], rows[-1]
