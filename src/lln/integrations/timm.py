"""Vision transformers of timm: convert a model that ``timm.create_model`` made.

    from lln.integrations.timm import convert

    model = timm.create_model("vit_base_patch16_224", pretrained=True)
    convert(model, "lln_diag", calibrate=images)

timm's attention modules call PyTorch's ``scaled_dot_product_attention`` (``fused_attn``), and that
call is what we answer (`lln.integrations.sdpa`). Window and relative-position attention (Swin,
BEiT) pass a bias of pairs and are refused.

To load a converted model again, save `describe` beside its state dict, make the model with timm,
call `attach_described` and load the state dict.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lln.checks.names import check_choice
from lln.checks.signatures import explain_misfits
from lln.errors import InvalidInputError, UnsupportedModelError
from lln.integrations.conversion_report import Conversion
from lln.integrations.sdpa import attach_described, convert_calls, describe
from lln.integrations.settings import (
    ATTENTIONS,
    Settings,
    check_mix_of,
    criterion_of,
    kept_offset,
)

__all__ = ["attach_described", "convert", "describe"]


@explain_misfits
def convert(
    model: nn.Module,
    attention: str = "lln_diag",
    *,
    layers: Sequence[int | str] | None = None,
    calibrate: Tensor | None = None,
    batch: Tensor | None = None,
    statistics: str | None = None,
    matching: str | None = None,
    mix: float | str = 0.5,
    block_size: int | None = None,
    keys: int = 64,
    select: str = "block",
    group_size: int | None = None,
    momentum: float = 0.1,
    impl: str = "auto",
    verbose: bool = False,
) -> Conversion:
    """Replace the attention of a timm model, in place.

    Args:
        model: With attention modules that use ``scaled_dot_product_attention``.
        attention: ``"lln"``, ``"lln_diag"`` or ``"lln_keys"``.
        layers: Numbers in the order they run, or names; None = all.
        calibrate: Images ``[B, C, height, width]`` to find α and β of every head on,
            with ``"lln_keys"`` also the offset.
        batch: Images for the runs that prove the conversion, without ``calibrate``; None = noise
            of the size the model was made for.
        statistics: As in `lln.integrations.convert.convert`, and likewise the rest.
        matching: Criterion of matching.
        mix: Weight of the LLN part, or a learned join.
        block_size: Tokens in a diagonal block; None = the head width, 64 for ``"lln_keys"``.
        keys: Of ``"lln_keys"``: how many keys outside its block a group of queries sees.
        select: How they are chosen (see `lln.choose_keys`).
        group_size: Queries that share them; None = a block for ``"block"``, else 1.
        momentum: Of ``"running"``.
        impl: As in `lln.lln_attention`.
        verbose: Whether to print the table too.

    Returns:
        What changed, and how far each layer's output and the model's moved.
    """
    unfused = [name for name, module in model.named_modules() if _is_unfused(module)]
    if unfused:
        raise UnsupportedModelError(
            f"{unfused[0]} has fused_attn=False and forms its weights itself; call "
            "timm.layers.set_fused_attn(True) before making the model."
        )
    if statistics is None:
        statistics = "sample" if calibrate is None else "fixed"
    if statistics in ("fixed", "learned") and calibrate is None:
        raise InvalidInputError(
            f"statistics={statistics!r} needs calibrate=, images to find α and β on."
        )
    check_choice("attention", attention, ATTENTIONS)
    check_mix_of(attention, mix)
    settings = Settings(
        matching=criterion_of(matching, attention),
        statistics=statistics,
        momentum=momentum,
        mix=mix,
        block_size=block_size,
        keys=keys,
        select=select,
        group_size=group_size,
        offset=kept_offset(attention, statistics, calibrate is not None),
        impl=impl,
        attached=True,
    )
    images = calibrate if calibrate is not None else batch
    report = convert_calls(
        model,
        _example(model) if images is None else images,
        attention,
        settings,
        layers=layers,
        calibrated=calibrate is not None,
    )
    report.warn()
    if verbose:
        report.show()
    return report


def _is_unfused(module: nn.Module) -> bool:
    return getattr(module, "fused_attn", None) is False


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
