"""Gradient checkpointing by the name that the transformers at hand has for it."""

from transformers import PreTrainedModel

# The older name warns where the newer one is known.
NAME = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if hasattr(PreTrainedModel, f"{name}_enable")
)


def checkpoint_layers(model, use_reentrant):
    """Let every layer of a model keep its inputs only, and compute the rest again."""
    getattr(model, f"{NAME}_enable")({"use_reentrant": use_reentrant})
