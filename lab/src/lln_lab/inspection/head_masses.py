"""What block, chosen keys and slots would hold of the attention of one call.

Dimension legend: B samples, H query heads.
"""

from __future__ import annotations

from torch import Tensor

from lln.instruments.observed_call import SeenCall
from lln_lab.inspection.key_masses import KEYS, key_masses

BLOCK = 64


def measure_masses(seen: SeenCall) -> dict[str, Tensor]:
    """Masses of a softmax call by name, ``[B, H]`` each; nothing for causal and cross attention."""
    if seen.tokens[0] != seen.tokens[1] or seen.options["is_causal"]:
        return {}
    shared = {name: seen.options[name] for name in ("key_mask", "scale")}
    found = key_masses(seen.query, seen.key, keys=KEYS, block_size=BLOCK, **shared)
    values = {"mass.block": found.block}
    for place, number in enumerate(KEYS):
        values[f"mass.keys_{number}"] = found.chosen[..., place]
        values[f"mass.rest_{number}"] = found.rest[..., place]
    return values
