"""Where the attention of one call lies: in block, chosen keys and slots, or in window and pages.

Dimension legend: B samples, H query heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lln.instruments.observed_call import SeenCall
from lln.integrations.settings import Settings
from lln_lab.inspection.key_masses import KEYS, key_masses
from lln_lab.inspection.page_masses import page_masses, page_numbers

BLOCK = 64


def measure_masses(seen: SeenCall) -> dict[str, Tensor]:
    """Masses of block, keys and slots by name, ``[B, H]``; none for causal and cross attention."""
    if seen.tokens[0] != seen.tokens[1] or seen.options["is_causal"]:
        return {}
    shared = {name: seen.options[name] for name in ("key_mask", "scale")}
    found = key_masses(seen.query, seen.key, keys=KEYS, block_size=BLOCK, **shared)
    values = {"mass.block": found.block}
    for place, number in enumerate(KEYS):
        values[f"mass.keys_{number}"] = found.chosen[..., place]
        values[f"mass.rest_{number}"] = found.rest[..., place]
    return values


def measure_page_masses(
    seen: SeenCall, given: dict[str, int]
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Masses of window, sinks and pages by name, ``[B, H]``, and their sizes; none for cross.

    Args:
        seen: A softmax call.
        given: Sizes that differ from what a conversion would give.
    """
    if seen.tokens[0] != seen.tokens[1]:
        return {}, {}
    sizes = dict(Settings.usual_pages(bool(seen.options["is_causal"])) | given)
    numbers = page_numbers(sizes["pages"])
    options: dict[str, Any] = {
        name: seen.options[name] for name in ("key_mask", "is_causal", "scale")
    }
    options |= sizes | {"pages": numbers}
    found = page_masses(seen.query, seen.key, **options)
    values = {"mass.window": found.window, "mass.sinks": found.sinks}
    for place, number in enumerate(numbers):
        values[f"mass.pages_{number}"] = found.chosen[..., place]
        values[f"mass.unseen_{number}"] = found.rest[..., place]
    return values, sizes
