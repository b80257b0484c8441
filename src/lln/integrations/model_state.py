"""What a conversion changes about a model for a while, and how it is put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from lln.integrations.attached import ATTRIBUTE, AttachedHeads, KeptSoftmax, attached_to
from lln.integrations.transformers import remember_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Eval mode without gradients, and back."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in model.modules():
            module.training = training.get(module, model.training)
        for module in model.modules():
            attached = attached_to(module)
            if attached is not None:
                attached.train(module.training)


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
            if ATTRIBUTE in module._modules and isinstance(
                module._modules[ATTRIBUTE], (AttachedHeads, KeptSoftmax)
            ):
                delattr(module, ATTRIBUTE)
            if own is not None:
                module.add_module(ATTRIBUTE, own)
        remember_attention(model)
        raise
