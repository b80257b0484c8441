"""What `convert` attaches to an attention module: its own α, β and join, saved with the model.

An attention function owns no state. Statistics per head, running averages and learned joins live
in a submodule ``lln`` of the attention module, which the function finds there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from lln import checks
from lln.errors import InvalidInputError, UnsupportedModelError
from lln.integrations.settings import Settings
from lln.matching.page_index import PageIndex
from lln.nn.heads import LLNDiagCore
from lln.nn.offsets import (
    FixedOffset,
    MatchedOffset,
    Temperature,
    make_offset,
    numbers_of_call,
)
from lln.nn.temperatures import FixedTemperatures
from lln.nn.value_convolution import ValueConvolution
from lln.tracing import is_compiling

# The name of the submodule in every converted attention module.
ATTRIBUTE = "lln"

# Settings that are built into `AttachedHeads`: changing them in the configuration does nothing.
_BUILT_IN = ("matching", "statistics", "momentum", "mix", "offset", "convolution", "rank")


class KeptSoftmax(nn.Module):
    """Marks an attention module that stays softmax by choice."""

    def sizes(self) -> dict[str, Any]:
        """Nothing to rebuild but the mark itself."""
        return {"softmax": True}


class KeptIndex(nn.Module):
    """What the pages of one attention module are chosen by, saved with the model."""

    query: Tensor
    key: Tensor

    def __init__(
        self, key_heads: int, width: int, rank: int, device: torch.device | str | None
    ) -> None:
        """NaN until it is set or loaded."""
        super().__init__()
        self.rank = rank
        for name in PageIndex._fields:
            empty = torch.full((key_heads, width, rank), torch.nan, device=device)
            self.register_buffer(name, empty)
        self._is_known = False

    def forward(self) -> PageIndex:
        """The projections; refused where they were neither found nor loaded."""
        if not self._is_known and not is_compiling():
            if bool(self.query.isnan().any() | self.key.isnan().any()):
                raise InvalidInputError(
                    "the projections that pages are chosen by were not in the checkpoint; convert "
                    "the original model again."
                )
            self._is_known = True
        return PageIndex(self.query, self.key)


class AttachedHeads(LLNDiagCore):
    """α, β and join of one attention module; with exact keys α, β and the offset.

    With pages what they are chosen by, and neither α nor β.

    With a convolution also its filter, which changes nothing before it is trained.

    Args:
        attention: ``"lln"``, ``"lln_diag"`` or ``"lln_keys"``.
        num_heads: H, query heads.
        head_dim: D.
        value_dim: E.
        settings: Of the model.
        keys: Of ``"lln_keys"``: how many keys this module sees exactly; None = as the settings say.
        key_heads: Hk; with pages that were calibrated.
        device: Where buffers and parameters live.
    """

    def __init__(
        self,
        attention: str,
        num_heads: int,
        head_dim: int,
        value_dim: int,
        settings: Settings,
        *,
        keys: int | None = None,
        key_heads: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Build the statistics and the join; temperatures are NaN until they are set or loaded."""
        self.has_pages = attention == "lln_keys" and bool(settings.pages)
        kept = settings.statistics in ("fixed", "learned") and not self.has_pages
        matching = settings.criterion(attention)
        # `numbers` halves what "entropy" gives, which is "rest".
        has_rest = attention == "lln_keys" and matching == "rest"
        super().__init__(
            num_heads,
            head_dim,
            join=settings.mix if isinstance(settings.mix, str) else "average",
            block_size=settings.block_size,
            value_dim=value_dim,
            matching="entropy" if has_rest else matching,
            statistics="sample" if self.has_pages else settings.statistics,
            alpha=1.0 if kept else None,
            beta=1.0 if kept else None,
            momentum=settings.momentum,
            impl=settings.impl,
            device=device,
        )
        self.attention, self.settings, self.matching = attention, settings, matching
        # Which settings fit which of this module.
        self._fitting: tuple[Settings, Settings] | None = None
        # Where softmax pays, and what ``config.lln`` held when that was asked (`short_calls`).
        self.softmax_pays: dict[Hashable, bool] = {}
        self.pays_under: dict[str, Any] = {}
        self.usual_scaling = head_dim**-0.5
        if keys is not None:
            checks.check_count("keys", keys, 0)
        self.keys, self.key_heads = keys, key_heads
        rank = settings.rank or max(head_dim // 2, 1)
        # As wide as the keys, it would be one more way to write them.
        has_index = self.has_pages and settings.statistics == "fixed" and rank < head_dim
        self.index = None
        if has_index:
            self.index = KeptIndex(key_heads or num_heads, head_dim, rank, device)
        size, channels = settings.convolution, num_heads * value_dim
        self.convolution = ValueConvolution(channels, size, device=device) if size else None
        self.fixed_mix = None if isinstance(settings.mix, str) else settings.mix
        # Without weights to load, attention must fail, not run at a made-up temperature.
        unknown = [*self.statistics.parameters(), *self.statistics.buffers()] if kept else []
        if attention == "lln_keys":
            found = settings.offset
            start = 0.0 if isinstance(found, str) else found
            self.offset = make_offset(start, found == "learned", num_heads, device)
            if isinstance(found, str):
                unknown.append(self._kept_offset())
        for tensor in unknown:
            tensor.data.fill_(torch.nan)

    def sizes(self) -> dict[str, Any]:
        """What a saved configuration needs to build this module again."""
        sizes: dict[str, Any] = {
            "attention": self.attention,
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "value_dim": self.value_dim,
        }
        own = {"keys": self.keys, "key_heads": self.key_heads}
        return sizes | {name: count for name, count in own.items() if count is not None}

    def check_settings(self, settings: Settings) -> None:
        """Refuse a configuration that was changed after conversion and does not fit this module."""
        if self._fitting and self._fitting[0] is settings and self._fitting[1] is self.settings:
            return
        if not settings.attached:
            raise InvalidInputError(
                "config.lln was replaced after conversion, and the model would be saved without "
                "its α and β; change single entries, as in config.lln['block_size'] = 64, or "
                "convert again with the new settings."
            )
        if bool(settings.pages) != bool(self.settings.pages):
            raise InvalidInputError(
                f"config.lln['pages'] was changed from {self.settings.pages} to {settings.pages} "
                "after conversion, which built one of the two forms; convert again with "
                f"pages={settings.pages}."
            )
        for name in _BUILT_IN if self.keys is None else (*_BUILT_IN, "keys"):
            found, kept = getattr(settings, name), getattr(self.settings, name)
            if found != kept:
                raise InvalidInputError(
                    f"config.lln[{name!r}] was changed from {kept!r} to {found!r} after "
                    f"conversion, which built it into the model; convert again with "
                    f"{name}={found!r}."
                )
        if not is_compiling():
            self._fitting, self.softmax_pays = (settings, self.settings), {}

    @torch.no_grad()
    def set_temperatures(self, alpha: Tensor, beta: Tensor) -> None:
        """Set ``"fixed"`` values, or the start of ``"learned"`` ones, from H values each."""
        for name, values in (("alpha", alpha), ("beta", beta)):
            learned = getattr(self.statistics, f"log_{name}", None)
            target = getattr(self.statistics, name) if learned is None else learned.data
            values = values.float().flatten().expand(self.num_heads)
            target.copy_(values if learned is None else values.log())

    @torch.no_grad()
    def set_offset(self, offset: Tensor) -> None:
        """Set a ``"fixed"`` offset, or the start of a ``"learned"`` one, from H values."""
        self._kept_offset().copy_(offset.float().flatten().expand(self.num_heads))

    @torch.no_grad()
    def set_index(self, found: PageIndex) -> None:
        """Set what pages are chosen by."""
        assert self.index is not None
        self.index.query.copy_(found.query)
        self.index.key.copy_(found.key)

    def _kept_offset(self) -> Tensor:
        assert not isinstance(self.offset, MatchedOffset)
        return self.offset.value

    @torch.no_grad()
    def fill_missing(self) -> None:
        """Set what a checkpoint did not hold to its starting value."""
        with torch.device("cpu"):
            fresh = rebuild(self.sizes(), self.settings)
        starts = dict(fresh.named_parameters()) | dict(fresh.named_buffers())
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if not getattr(tensor, "_is_hf_initialized", False) and not tensor.is_meta:
                tensor.data.copy_(starts[name])

    def temperatures(
        self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        """α, β that broadcast to ``[B, H, 1, 1]``."""
        call = self._checked(query, key, value, key_mask, is_causal)
        return self.statistics(call.query, call.key, key_mask, is_causal)

    def numbers(
        self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, is_causal: bool
    ) -> tuple[Temperature, Temperature, Tensor | None]:
        """α, β and the offset of ``"lln_keys"``; None = matched to the sample."""
        call = self._checked(query, key, value, key_mask, is_causal)
        sides = (call.query, call.key, key_mask, self.matching, self.impl)
        return numbers_of_call(self.statistics, self.offset, *sides)

    def weight(self, query: Tensor, key_mask: Tensor | None) -> float | Tensor:
        """The weight of the LLN part, for joins that have one; broadcasts to ``[B, H, T, E]``."""
        return self._mix(query, key_mask) if self.fixed_mix is None else self.fixed_mix

    def neighbours(self, value: Tensor, key_mask: Tensor | None) -> Tensor:
        """What the convolution adds to the output, ``[B, H, T, E]``, from ``[B, Hk, T, E]``."""
        assert self.convolution is not None
        shared = self.num_heads // value.shape[1]
        flat = value.repeat_interleave(shared, 1).transpose(1, 2).flatten(2)
        added = self.convolution(flat, key_mask)
        return added.unflatten(2, (self.num_heads, -1)).transpose(1, 2)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AttachedHeads:
        """Follow the model to another device, but keep what was calibrated in float32."""
        kinds = (FixedTemperatures, FixedOffset, KeptIndex)
        fixed = [module for module in self.children() if isinstance(module, kinds)]
        before = [(module, dict(module.named_buffers())) for module in fixed]
        super()._apply(fn, recurse)
        # On another device, or in other numbers, something else may be sooner.
        self.softmax_pays = {}
        for module, buffers in before:
            for name, buffer in buffers.items():
                moved = getattr(module, name)
                if moved.dtype != buffer.dtype:
                    setattr(module, name, buffer.to(moved.device))
        return self

    def combine(self, long_range: Tensor, short_range: Tensor, mix: float | Tensor) -> Tensor:
        """Join two outputs ``[B, H, T, E]``."""
        if self.join == "scale":
            out = self.lln_scale * long_range + self.diag_scale * short_range
            return out.to(long_range.dtype)
        if self.join == "heads":
            count = self.lln_heads
            return torch.cat([long_range[:, :count], short_range[:, count:]], dim=1)
        return (mix * long_range + (1 - mix) * short_range).to(long_range.dtype)


def attached_to(module: nn.Module) -> AttachedHeads | KeptSoftmax | None:
    """The submodule that `convert` gave an attention module, if it did."""
    found = module._modules.get(ATTRIBUTE)
    return found if isinstance(found, (AttachedHeads, KeptSoftmax)) else None


def attach(module: nn.Module, attached: AttachedHeads | KeptSoftmax) -> None:
    """Give an attention module its submodule, in place of an earlier one."""
    if attached_to(module) is not None:
        delattr(module, ATTRIBUTE)
    elif hasattr(module, ATTRIBUTE):
        raise UnsupportedModelError(
            f"{type(module).__name__} has an attribute {ATTRIBUTE!r} of its own."
        )
    module.add_module(ATTRIBUTE, attached)


def rebuild(
    sizes: dict[str, Any], settings: Settings, kind: type[AttachedHeads] = AttachedHeads
) -> AttachedHeads | KeptSoftmax:
    """The submodule that a saved configuration describes, ready for its weights."""
    if sizes.get("softmax"):
        return KeptSoftmax()
    # A model loaded in half precision is built under that default; statistics stay float32.
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        return kind(
            sizes["attention"],
            sizes["num_heads"],
            sizes["head_dim"],
            sizes["value_dim"],
            settings,
            keys=sizes.get("keys"),
            key_heads=sizes.get("key_heads"),
        )
    finally:
        torch.set_default_dtype(default)
