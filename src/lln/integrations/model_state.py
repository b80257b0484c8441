"""What a conversion changes about a Hugging Face model, and how it is put back if it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lln.integrations.attached import ATTRIBUTE, attached_to
from lln.integrations.transformers import remember_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def undone_on_error(model: PreTrainedModel) -> Iterator[None]:
    """Leave the model as it was if anything fails."""
    configs = {id(model.config): model.config}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            configs[id(config)] = config
    before = [
        (config, config._attn_implementation, getattr(config, "lln", None))
        for config in configs.values()
    ]
    attached = [(module, attached_to(module)) for module in model.modules()]
    try:
        yield
    except BaseException:
        for config, implementation, settings in before:
            config._attn_implementation_internal = implementation
            if settings is not None:
                config.lln = settings
            elif hasattr(config, "lln"):
                delattr(config, "lln")
        for module, own in attached:
            if attached_to(module) is not None:
                delattr(module, ATTRIBUTE)
            if own is not None:
                module.add_module(ATTRIBUTE, own)
        remember_attention(model)
        raise
