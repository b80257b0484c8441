"""A cache of fixed size for ``generate()``: the summary of all tokens instead of the tokens.

Layers that see pages may go back to any token, and get a cache that grows (`page_cache`).

A cache layer of Hugging Face is asked to take new keys and values in and to return those to attend
to. Ours returns the new ones as they are, marked with what is kept of the past; the attention
function reads that mark and extends it. So a token costs the same in time and memory wherever it
stands.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.errors import InvalidInputError, LLNError
from lln.integrations import unavailable
from lln.integrations.attached import AttachedHeads, attached_to
from lln.integrations.settings import SUMMARISED, Settings
from lln.integrations.streaming import Past

try:
    from transformers import PreTrainedModel
    from transformers.cache_utils import (
        Cache,
        CacheLayerMixin,
        DynamicLayer,
        DynamicSlidingWindowLayer,
    )
except ImportError as error:
    raise unavailable(error) from error

from lln.integrations.page_cache import ChangesWhole, PageCacheLayer


class LLNCacheLayer(ChangesWhole, CacheLayerMixin):
    """One layer's past: a `KeySummary` and the unfinished diagonal block, whatever the length."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, **kwargs: Any) -> None:
        """Start with no past."""
        super().__init__(**kwargs)
        self.past = Past()
        self.seen_tokens = 0
        self._waiting = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note where the tensors live."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values, marked with the past they continue."""
        if self._waiting:
            raise LLNError(
                "the attention that ran after LLNCache was not LLN attention, or the model changed "
                "its keys in between; use LLNCache with models whose attn_implementation is 'lln' "
                "or 'lln_diag' only."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._waiting = True
        self.seen_tokens += key_states.shape[-2]
        key_states = key_states.view_as(key_states)
        key_states.lln_past = self  # pyright: ignore[reportAttributeAccessIssue]
        return key_states, value_states

    def take(self) -> Past:
        """The past, for the attention function to read and extend once."""
        if not self._waiting:
            raise LLNError(
                "this model attends more than once to the same keys of a layer, and LLNCache would "
                "count them as often; generate with past_key_values=transformers.DynamicCache()."
            )
        self._waiting = False
        return self.past

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask: all tokens so far and the new ones."""
        return self.seen_tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.seen_tokens

    def get_max_length(self) -> int:
        """There is no maximum."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.past, self.seen_tokens, self._waiting = Past(), 0, False

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: a summary cannot forget single tokens."""
        if tokens_to_remove != 0:
            raise InvalidInputError(
                "LLNCache cannot be cropped: tokens cannot be taken out of a summary; generate "
                "without assistant models, or with past_key_values=DynamicCache()."
            )

    def size(self) -> int:
        """Bytes held."""
        return sum(
            tensor.numel() * tensor.element_size() for tensor in self.past.tensors().values()
        )

    def _change(self, change: Any) -> None:
        for name, tensor in self.past.tensors().items():
            setattr(self.past, name, change(tensor))


class WindowCacheLayer(DynamicSlidingWindowLayer):
    """The past of a layer with a sliding window: the keys that its next token can see."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values behind those kept; keep the last of them."""
        new, before = key_states.shape[2], self.sliding_window - 1
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if not self.record_past:
            self.keys, self.values = _last(keys, before), _last(values, before)
            if new > 1:
                # Views would keep the whole prompt alive.
                self.keys, self.values = self.keys.clone(), self.values.clone()
        # A past that is recorded, to be cropped, may hold more than masks are made for.
        return _last(keys, before + new), _last(values, before + new)

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens away, of a past that is recorded."""
        # Assisted generation gives a tensor in older transformers; positions are to stay numbers.
        super().crop(int(tokens_to_remove))


class LLNCache(Cache):
    """The cache of a causal model with LLN attention: of fixed size, but for layers with pages.

    ``generate()`` makes one by itself once `lln.integrations.transformers.register` was called;
    make one yourself to continue a conversation or to run the model step by step.

    Args:
        model: With ``attn_implementation`` ``"lln"`` or ``"lln_diag"``, or with pages of
            ``"lln_keys"``; layers with a sliding window keep the keys inside it, others that keep
            softmax all keys.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Choose the kind of every layer."""
        config = model.config.get_text_config(decoder=True)
        if not can_be_cached(config):
            raise InvalidInputError(
                f"LLNCache is for models with attn_implementation 'lln' or 'lln_diag', or with "
                f"pages of 'lln_keys', got {config._attn_implementation!r}."
            )
        layers: dict[int, CacheLayerMixin] = {**_softmax_layers(model, config)}
        if config._attn_implementation not in SUMMARISED:
            heads = _heads_by_layer(model)
            for index in range(config.num_hidden_layers):
                layers.setdefault(index, PageCacheLayer(heads.get(index)))
        super().__init__(
            layers=[
                layers.get(index) or LLNCacheLayer() for index in range(config.num_hidden_layers)
            ]
        )

    def size(self) -> int:
        """Bytes held by the LLN layers."""
        kinds = (LLNCacheLayer, PageCacheLayer)
        return sum(layer.size() for layer in self.layers if isinstance(layer, kinds))

    def __iter__(self) -> Any:
        """Pairs of keys and values, as other caches give them; ours has none to give."""
        raise InvalidInputError("LLNCache keeps summaries; it has no keys and values to iterate.")


def can_be_cached(config: Any) -> bool:
    """Whether `LLNCache` serves the attention of a text model's configuration."""
    name = config._attn_implementation
    return name in SUMMARISED or (name == "lln_keys" and bool(Settings.of(config).pages))


def _heads_by_layer(model: torch.nn.Module) -> dict[int, AttachedHeads]:
    """What `convert` attached, by the number of the layer."""
    found = ((getattr(module, "layer_idx", -1), attached_to(module)) for module in model.modules())
    return {index: heads for index, heads in found if isinstance(heads, AttachedHeads)}


def _softmax_layers(model: torch.nn.Module, config: Any) -> dict[int, DynamicLayer]:
    """The caches of the layers that keep softmax attention, by index."""
    layers = {
        getattr(module, "layer_idx", -1): DynamicLayer()
        for module in model.modules()
        if (found := attached_to(module)) is not None and not isinstance(found, AttachedHeads)
    }
    kinds = getattr(config, "layer_types", None)
    for index, layer in enumerate(config.per_layer_config):
        window = getattr(layer, "sliding_window", None)
        if window is not None and (not kinds or kinds[index] == "sliding_attention"):
            layers[index] = WindowCacheLayer(window)
    return layers


def _last(side: Tensor, count: int) -> Tensor:
    """The last keys or values of those that are there."""
    return side[:, :, max(side.shape[2] - count, 0) :]
