"""Vision transformers of timm: convert a model that ``timm.create_model`` made.

    from lln.integrations.timm import convert

    model = timm.create_model("vit_base_patch16_224", pretrained=True)
    convert(model, "lln_diag", calibrate=images)
    convert(model, target=0.99, calibrate=images)  # chooses how many exact keys every layer needs

timm's attention modules call PyTorch's ``scaled_dot_product_attention`` (``fused_attn``), and that
call is what we answer (`lln.integrations.sdpa`). Window and relative-position attention (Swin,
BEiT) pass a bias of pairs and are refused.

To load a converted model again, save `describe` beside its state dict, make the model with timm,
call `attach_described` and load the state dict.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from lln.checks.signatures import explain_misfits
from lln.errors import InvalidInputError, UnsupportedModelError
from lln.integrations.call_surgeon import CallSurgeon
from lln.integrations.conversion_report import Conversion
from lln.integrations.progress import step_bar
from lln.integrations.sdpa import attach_described, describe
from lln.integrations.searches import OnStep, search_for
from lln.integrations.settings import Settings

__all__ = ["attach_described", "convert", "describe"]

# What a batch of images is called where batches are dictionaries.
_IMAGES = "images"


@explain_misfits
def convert(
    model: nn.Module,
    attention: str = "lln_keys",
    *,
    layers: Sequence[int | str] | None = None,
    calibrate: Tensor | None = None,
    target: float | None = None,
    holdout: Tensor | None = None,
    batch: Tensor | None = None,
    statistics: str | None = None,
    matching: str | None = None,
    mix: float | str = 0.5,
    block_size: int | None = None,
    keys: int | None = None,
    group_size: int | None = None,
    convolution: int = 0,
    momentum: float = 0.1,
    impl: str = "auto",
    verbose: bool = False,
    on_step: OnStep | None = None,
) -> Conversion:
    """Replace the attention of a timm model, in place.

    The arguments are those of `lln.integrations.convert.convert`, but batches are images
    ``[B, C, height, width]``; without ``calibrate`` and ``batch`` they are noise of the size the
    model was made for. A target compares logits, or the features of a model without a head
    (``num_classes=0``).

    Returns:
        What changed, and how far each layer's output and the model's moved. With a target also
        quality against time for other numbers of keys, as ``.target``.
    """
    modules = model.named_modules()
    unfused = [name for name, module in modules if getattr(module, "fused_attn", None) is False]
    if unfused:
        raise UnsupportedModelError(
            f"{unfused[0]} has fused_attn=False and forms its weights itself; call "
            "timm.layers.set_fused_attn(True) before making the model."
        )
    settings = Settings.of_conversion(
        attention,
        calibrate is not None,
        statistics,
        matching,
        mix,
        momentum=momentum,
        block_size=block_size,
        keys=keys,
        group_size=group_size,
        convolution=convolution,
        impl=impl,
    )
    search = search_for(target, holdout, model, attention, settings.statistics, keys, calibrate)
    for name, images in (("calibrate", calibrate), ("holdout", holdout), ("batch", batch)):
        if images is not None and not isinstance(images, Tensor):
            raise InvalidInputError(
                f"{name} must be a tensor of images [B, C, height, width], got "
                f"{type(images).__name__}."
            )
    images = calibrate if calibrate is not None else batch
    inputs = {_IMAGES: _example(model) if images is None else images}
    unseen = None if holdout is None else {_IMAGES: holdout}
    compared = "features" if getattr(model, "num_classes", None) == 0 else "logits"

    def run(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        outputs = model(inputs[_IMAGES])
        return {compared: outputs if isinstance(outputs, Tensor) else outputs[0]}

    surgeon = CallSurgeon(model, run, attention, settings, layers, calibrate is not None, search)
    with step_bar() if on_step is None else nullcontext(on_step) as tell:
        report = surgeon.convert(inputs, unseen, tell)
    report.warn()
    if verbose:
        report.show()
    return report


def _example(model: nn.Module) -> Tensor:
    """Noise of the size that the model's own configuration names."""
    configuration = getattr(model, "pretrained_cfg", None) or {}
    size = configuration.get("input_size")
    patches = getattr(model, "patch_embed", None)
    made_for = getattr(patches, "img_size", None)
    if size is None:
        raise InvalidInputError(
            f"no example can be made up for {type(model).__name__}, which names no input_size; "
            "pass batch= or calibrate= with images."
        )
    shape = (1, size[0], *(made_for or size[1:]))
    parameter = next(model.parameters())
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return noise.to(parameter.device, parameter.dtype)
