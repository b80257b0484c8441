"""Hugging Face transformers: one call, and ``attn_implementation="lln_diag"`` works.

    from lln.integrations.transformers import register

    register()
    model = AutoModel.from_pretrained(folder, attn_implementation="lln_diag")

`register` adds the attention functions *and* their mask function. It also makes models remember
their attention: transformers itself drops it on save, and a model trained with LLN attention would
come back with softmax. Settings live in ``config.lln`` (see `lln.integrations.settings`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
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
from lln.integrations.attend import attention_function
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
        AttentionInterface.register(name, attention_function(name))
        AttentionMaskInterface.register(name, slicing_mask)
    _wrap(PreTrainedModel, "get_correct_attn_implementation", _choose)
    _wrap(PreTrainedModel, "post_init", _post_init)
    _wrap(PreTrainedModel, "_initialize_weights", _initialize)
    _wrap(GenerationMixin, "_prepare_cache_for_generation", _prepare_cache)
    _registered = True


def _wrap(owner: type, method: str, around: Callable[..., Any]) -> None:
    """Let ``around`` run in place of a method, which it gets as its first argument."""
    original = getattr(owner, method)

    @wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(owner, method, wrapper)


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


def _choose(
    choose: Any, model: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any
) -> str:
    """What every model asks, before it builds a layer, about the attention it is to have."""
    _recall_attention(model.config)
    attention = attention_of(requested_attention)
    if attention in ATTENTIONS:
        refuse_own_attention(model, attention)
    elif attention not in ALL_ATTENTION_FUNCTIONS:
        # transformers would list its own names only.
        meant = did_you_mean(attention, ATTENTIONS)
        if meant:
            raise InvalidInputError(f"attn_implementation {attention!r} does not exist{meant}.")
    return choose(model, attention, *args, **kwargs)


def _recall_attention(config: Any) -> None:
    """Undo `remember_attention` in a configuration that was loaded, and in its parts."""
    config._attn_implementation_internal = attention_of(config._attn_implementation)
    for part in config.sub_configs:
        if (found := getattr(config, part, None)) is not None:
            _recall_attention(found)


def _post_init(post_init: Any, model: PreTrainedModel) -> None:
    """What every model calls at the end of its construction, before weights are loaded."""
    attach_saved(model)
    post_init(model)
    remember_attention(model)


def _initialize(
    initialize: Any, model: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any
) -> None:
    """What transformers calls for every module whose weights a checkpoint did not hold."""
    if isinstance(module, AttachedHeads) and not getattr(module, "_is_hf_initialized", False):
        module.fill_missing()
    initialize(model, module, *args, **kwargs)


def _prepare_cache(
    prepare: Any, model: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any
) -> Any:
    """What ``generate()`` calls to make its cache."""
    config = model.config.get_text_config(decoder=True)
    if (
        not can_be_cached(config)
        or model.config.is_encoder_decoder
        or model_kwargs.get("past_key_values") is not None
        or generation_config.use_cache is False
        or generation_config.cache_implementation not in (None, "dynamic")
    ):
        return prepare(model, generation_config, model_kwargs, *args, **kwargs)
    cache = model_kwargs["past_key_values"] = LLNCache(model)
    if generation_config.is_assistant:
        # Guesses are taken back; transformers tells the caches that it makes.
        cache.activate_past_recording()
    # transformers restricts a cache that the user gives; this one is not the user's.
    chosen = generation_config.cache_implementation
    generation_config.cache_implementation = None
    try:
        return prepare(model, generation_config, model_kwargs, *args, **kwargs)
    finally:
        generation_config.cache_implementation = chosen
        model_kwargs["past_key_values"]._is_user_defined = False
