"""One call of an attention function, with what the module and its settings say of it.

Dimension legend: as in `lln.checks.call`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from lln.checks.key_options import check_group_size, check_not_causal
from lln.errors import CausalStatisticsError
from lln.integrations.attached import AttachedHeads
from lln.integrations.packed_batches import is_packed, padded
from lln.integrations.settings import KEYS_BLOCK, Settings


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function.

    Attributes:
        module: The model's attention module.
        attention: ``"lln"``, ``"lln_diag"`` or ``"lln_keys"``.
        settings: Of the module's configuration.
        heads: What `convert` attached, if it did.
        query: ``[B, H, T, D]``, scaled so that softmax scores are q·k/√D.
        key: ``[B, Hk, S, D]``.
        value: ``[B, Hk, S, E]``.
        mask: As `lln.integrations.masks.slicing_mask` returns it.
        cu_seqlens: Boundaries of packed sequences over all B·T tokens, if there are any.
        is_causal: Whether a query sees only its own and earlier positions.
        window: Width of a sliding window, if the layer has one.
        dropout_p: Probability to drop a key.
        indexed: What a cache keeps to choose pages by, ``[B, Hk, S, r]``.
    """

    module: nn.Module
    attention: str
    settings: Settings
    heads: AttachedHeads | None
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    is_causal: bool = False
    window: int | None = None
    dropout_p: float = 0.0
    indexed: Tensor | None = None

    @property
    def block_size(self) -> int:
        """Tokens in a diagonal block."""
        usual = KEYS_BLOCK if self.attention == "lln_keys" else self.query.shape[-1]
        return self.settings.block_size or usual

    @property
    def group_size(self) -> int:
        """How many queries share their exact keys."""
        return check_group_size(self.settings.group_size, self.block_size)

    @property
    def keys(self) -> int:
        """How many keys outside its block a group of queries sees exactly."""
        own = None if self.heads is None else self.heads.keys
        return self.settings.keys if own is None else own

    @property
    def has_pages(self) -> bool:
        """Whether a query sees pages, in place of block, keys and slots."""
        return self.attention == "lln_keys" and bool(self.settings.pages)

    @property
    def page_sizes(self) -> dict[str, int]:
        """How many pages and other tokens a query sees."""
        usual = self.settings.usual_pages(self.is_causal)
        given = {name: getattr(self.settings, name) for name in usual}
        return usual | {name: number for name, number in given.items() if number is not None}

    def page_options(self) -> dict[str, Any]:
        """What `lln.page_attention` is told besides."""
        found: dict[str, Any] = {**self.page_sizes}
        if self.heads is not None and self.heads.index is not None:
            index = self.heads.index()
            keys = index.of_keys(self.key) if self.indexed is None else self.indexed
            found["choice"] = index.of_queries(self.query), keys
        return found

    @property
    def key_mask(self) -> Tensor | None:
        """Bool ``[B, S]``, the valid tokens; None where there is no padding."""
        return None if is_packed(self.mask) else self.mask

    def how(self) -> dict[str, Any]:
        """What every attention of the library is told: what a row sees, and what computes it."""
        return {"is_causal": self.is_causal, "enable_gqa": True, "impl": self.settings.impl}

    def key_options(self) -> dict[str, Any]:
        """What attention with exact keys is told besides; α, β and the offset are of this call."""
        check_not_causal(self.is_causal)
        alpha, beta, offset = self.numbers()
        return {
            "alpha": alpha,
            "beta": beta,
            "offset": offset,
            "matching": self.settings.criterion(self.attention),
            "keys": self.keys,
            "block_size": self.block_size,
            "group_size": self.group_size,
        }

    def temperatures(self) -> tuple[float | Tensor | None, float | Tensor | None]:
        """α and β; None, None = to be matched to the sample."""
        if self.heads is None:
            return self._stateless_temperatures()
        # To these statistics each packed sequence is a sample of its own.
        if self.cu_seqlens is not None and self.settings.statistics == "sample":
            return None, None
        sides, mask = self._measured()
        return self.heads.temperatures(*sides, mask, self.is_causal)

    def numbers(
        self,
    ) -> tuple[float | Tensor | None, float | Tensor | None, float | Tensor | None]:
        """α, β and offset of ``"lln_keys"``; None = to be matched to the sample."""
        if self.heads is not None:
            sides, mask = self._measured()
            return self.heads.numbers(*sides, mask, self.is_causal)
        offset = self.settings.offset
        # Checked with the settings: without a module to live in, the offset is a number.
        assert not isinstance(offset, str)
        return *self._stateless_temperatures(), offset

    def _measured(self) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
        """What statistics are taken of: query, key and value, and which tokens count."""
        sides, mask = (self.query, self.key, self.value), self.key_mask
        learns = self.heads is not None and self.heads.training
        if self.cu_seqlens is not None and learns and self.settings.statistics == "running":
            return padded(sides, self.cu_seqlens)
        return sides, mask

    def _stateless_temperatures(self) -> tuple[float | None, float | None]:
        if self.settings.statistics == "fixed":
            return self.settings.alpha, self.settings.beta
        if self.is_causal:
            raise CausalStatisticsError(
                "causal LLN attention needs α and β that do not come from the sequence itself: use "
                "lln.integrations.convert.convert(model, calibrate=batch), or config.lln = "
                "{'statistics': 'fixed', 'alpha': ..., 'beta': ...}."
            )
        return None, None

    def mix(self) -> float | Tensor:
        """The weight of the LLN part, broadcasting to ``[B, H, T, E]``."""
        if self.heads is None:
            # Checked with the settings: without a module to learn in, the mix is a number.
            return cast("float", self.settings.mix)
        return self.heads.weight(self.query, self.key_mask)
