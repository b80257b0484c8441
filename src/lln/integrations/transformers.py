"""Hugging Face transformers: one call, and ``attn_implementation="lln_diag"`` works.

    from lln.integrations.transformers import register

    register()
    model = AutoModel.from_pretrained(folder, attn_implementation="lln_diag")

`register` adds the attention functions *and* their mask function. It also makes models remember
their attention: transformers itself drops it on save, and a model trained with LLN attention would
come back with softmax. Settings live in ``config.lln`` (see `lln.integrations.settings`).
"""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

from torch import nn

from lln.checks.names import did_you_mean
from lln.errors import InvalidInputError
from lln.integrations import too_old, unavailable
from lln.integrations.settings import (
    ATTENTIONS,
    SAVED_AS,
    Settings,
    attention_of,
    check_layers,
)

try:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.generation.utils import GenerationMixin
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ImportError as error:
    raise unavailable(error) from error

from lln.integrations.attached import ATTRIBUTE, AttachedHeads, attached_to, rebuild
from lln.integrations.attend import forward
from lln.integrations.cache import LLNCache, can_be_cached
from lln.integrations.masks import slicing_mask
from lln.integrations.own_attention import refuse_own_attention

__all__ = ["LLNCache", "register"]

_registered = False


def register() -> None:
    """Make ``attn_implementation="lln"``, ``"lln_diag"`` and ``"lln_keys"`` known to transformers.

    Calling it again does nothing. Four things happen:

    - the names get an attention function and a mask function;
    - a model that would ignore them, or break on them, is refused before it is built;
    - models are built with what `lln.integrations.convert` attached before they were saved, and
      note their attention where ``save_pretrained`` keeps it;
    - ``generate()`` uses `LLNCache`, unless it is given another cache; models with blocks and
      slots of ``"lln_keys"`` generate without a cache.
    """
    global _registered
    if _registered:
        return
    old = too_old(transformers.__version__)
    if old is not None:
        raise old
    for name in ATTENTIONS:
        AttentionInterface.register(name, partial(forward, name))
        AttentionMaskInterface.register(name, slicing_mask)
    for owner, method, wrap in (
        (PreTrainedModel, "get_correct_attn_implementation", _refusing),
        (PreTrainedModel, "post_init", _remembering),
        (PreTrainedModel, "_initialize_weights", _filling),
        (GenerationMixin, "_prepare_cache_for_generation", _with_cache),
    ):
        setattr(owner, method, wrap(getattr(owner, method)))
    _registered = True


def remember_attention(model: PreTrainedModel) -> None:
    """Note the attention in the configuration's own attributes, which are saved.

    ``_attn_implementation`` is dropped on save, a plain ``attn_implementation`` is written and
    honoured on load.
    """
    config = model.config
    if config._attn_implementation in ATTENTIONS:
        config.attn_implementation = SAVED_AS[config._attn_implementation]
    elif attention_of(getattr(config, "attn_implementation", None)) in ATTENTIONS:
        delattr(config, "attn_implementation")


def attach_saved(model: PreTrainedModel) -> None:
    """Give attention modules the submodules that the configuration describes."""
    if model.config._attn_implementation not in ATTENTIONS:
        return
    settings = Settings.of(model.config)
    check_layers(settings.layers)
    for name, sizes in (settings.layers or {}).items():
        module = find_module(model, name)
        if module is not None and attached_to(module) is None:
            module.add_module(ATTRIBUTE, rebuild(sizes, settings))


def find_module(model: PreTrainedModel, name: str) -> nn.Module | None:
    """The module of that name inside the base model; None if this part of the model has none."""
    try:
        return model.base_model.get_submodule(name)
    except AttributeError:
        return None


def name_of_module(model: PreTrainedModel, module: nn.Module) -> str:
    """The name of a module inside the base model."""
    for name, found in model.base_model.named_modules():
        if found is module:
            return name
    raise InvalidInputError(
        f"{type(module).__name__} runs attention outside the model's base_model, where it cannot "
        "be found again after saving."
    )


def _refusing(choose: Any) -> Any:
    """Wrap what every model asks, before it builds a layer, about the attention it is to have."""

    @wraps(choose)
    def wrapper(
        self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any
    ) -> str:
        _recall_attention(self.config)
        attention = attention_of(requested_attention)
        if attention in ATTENTIONS:
            refuse_own_attention(self, attention)
        elif attention not in ALL_ATTENTION_FUNCTIONS:
            _suggest(attention)
        return choose(self, attention, *args, **kwargs)

    return wrapper


def _suggest(attention: str | None) -> None:
    """Refuse a name that is almost one of ours; transformers would list its own only."""
    meant = did_you_mean(attention, ATTENTIONS)
    if meant:
        raise InvalidInputError(f"attn_implementation {attention!r} does not exist{meant}.")


def _recall_attention(config: Any) -> None:
    """Undo `remember_attention` in a configuration that was loaded, and in its parts."""
    config._attn_implementation_internal = attention_of(config._attn_implementation)
    for part in config.sub_configs:
        if (found := getattr(config, part, None)) is not None:
            _recall_attention(found)


def _remembering(post_init: Any) -> Any:
    """Wrap what every model calls at the end of its construction, before weights are loaded."""

    @wraps(post_init)
    def wrapper(self: PreTrainedModel) -> None:
        attach_saved(self)
        post_init(self)
        remember_attention(self)

    return wrapper


def _filling(initialize: Any) -> Any:
    """Wrap what transformers calls for every module whose weights a checkpoint did not hold."""

    @wraps(initialize)
    def wrapper(self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, AttachedHeads) and not getattr(module, "_is_hf_initialized", False):
            module.fill_missing()
        initialize(self, module, *args, **kwargs)

    return wrapper


def _with_cache(prepare: Any) -> Any:
    """Wrap what ``generate()`` calls to make its cache."""

    @wraps(prepare)
    def wrapper(
        self: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        config = self.config.get_text_config(decoder=True)
        if (
            can_be_cached(config)
            and not self.config.is_encoder_decoder
            and model_kwargs.get("past_key_values") is None
            and generation_config.use_cache is not False
            and generation_config.cache_implementation in (None, "dynamic")
        ):
            cache = model_kwargs["past_key_values"] = LLNCache(self)
            if generation_config.is_assistant:
                # Guesses are taken back; transformers tells the caches that it makes.
                cache.activate_past_recording()
            # transformers restricts a cache that the user gives; this one is not the user's.
            chosen, generation_config.cache_implementation = (
                generation_config.cache_implementation,
                None,
            )
            try:
                return prepare(self, generation_config, model_kwargs, *args, **kwargs)
            finally:
                generation_config.cache_implementation = chosen
                model_kwargs["past_key_values"]._is_user_defined = False
        return prepare(self, generation_config, model_kwargs, *args, **kwargs)

    return wrapper
