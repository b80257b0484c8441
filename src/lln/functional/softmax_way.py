"""The way that runs softmax itself, in calls so short that nothing is sooner.

A model whose layers were converted, and not trained since, loses nothing by it: softmax is what it
was trained with. Only such calls allow it (`Call.or_softmax`).

Up to how many tokens softmax is sooner was measured (``crossings.json``, filled by
``python -m lln_lab.benchmarks.short_calls``).

Dimension legend: as in `lln.checks.call`.
"""

from __future__ import annotations

import json
import math
from importlib import resources

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.checks.call import Call
from lln.eager.run import repeat_heads
from lln.functional.cpu_ways import CompiledKeys
from lln.functional.key_ways import KeyKernels
from lln.functional.way import Prepared, Way
from lln.observers import is_observed
from lln.tracing import is_untraced

Crossings = dict[str, dict[str, list[tuple[int | None, int]]]]
CROSSINGS: Crossings = json.loads(
    resources.files("lln.functional").joinpath("crossings.json").read_text("utf-8")
)["crossings"]
# What runs instead of plain PyTorch, where it can.
_ENGINES = {"cpu": CompiledKeys(), "cuda": KeyKernels()}


class Softmax(Way):
    """Softmax itself, where a converted layer may run it and no exact keys are sooner."""

    name = "softmax itself"
    impl = "eager"
    kinds = ("lln_keys",)
    is_whole = False

    def why_not(self, call: Call) -> str | None:
        """See `Way.why_not`."""
        if not call.or_softmax:
            return "is not allowed to replace exact keys by softmax here"
        if is_observed() or not is_untraced(*call.qkv, call.key_mask):
            return "runs exact keys where somebody watches"
        if call.bounds is not None or (call.is_causal and call.key_mask is not None):
            return "would need a mask of all pairs"
        sides = call.query.shape[-1], call.value.shape[-1]
        on_gpu = call.query.is_cuda
        if sides[0] != sides[1] or (on_gpu and (sides[0] > 256 or call.query.dtype.itemsize == 8)):
            return "would need all pairs of scores at once"
        return None

    def pays(self, call: Call) -> bool:
        """Where softmax was measured to be sooner, or all keys would be exact anyhow."""
        return bool(_why(call))

    def prepare(self, call: Call) -> Prepared:
        """See `Way.prepare`."""
        return Prepared(self, how=(_why(call),))

    def describe(self, prepared: Prepared) -> str:
        """A sentence on what computes a prepared call."""
        return f"{': '.join(('Softmax itself computes the call', *prepared.how))}."

    def run(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.run`; without α and β."""
        del prepared
        return softmax_attention(*call.qkv, call.key_mask, call.is_causal, call.scale)


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    is_causal: bool,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention, Eq. (1), of a dense call, ``[B, H, T, E]``; a mask is not for causal ones.

    As everywhere, what masked keys hold does not count, and without any key the output is 0.
    """
    mask, grouped = None, key.shape[1] != query.shape[1]
    if key_mask is not None:
        # 0 · NaN would be NaN. A text without keys then averages zeros.
        there = key_mask[:, None, :, None]
        key, value = torch.where(there, key, 0.0), torch.where(there, value, 0.0)
        mask = (key_mask | ~key_mask.any(1, keepdim=True))[:, None, None, :]
    if grouped and (mask is not None or not query.is_cuda):
        key, value = (repeat_heads(side, query.shape[1]) for side in (key, value))
        grouped = False
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )


def _why(call: Call) -> str:
    """Why softmax is taken, as a sentence without its end; empty if it is not."""
    batch, heads, tokens, _ = call.query.shape
    device = call.query.device
    engine = _ENGINES.get(device.type)
    instead = "causal" if call.is_causal else "plain"
    if not call.is_causal and engine is not None and engine.why_not(call) is None:
        instead = "compiled"
    exact = call.keys if isinstance(call.keys, int) else 0
    # All blocks but one. Compiled passes are no slower than softmax there: the table says.
    others = (tokens - 1) // call.block_size * call.block_size
    if exact >= others and (device.type, instead) != ("cpu", "compiled"):
        return "blocks and exact keys would hold every token"
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    table = CROSSINGS.get(chip) or CROSSINGS.get(device.type, {})
    fits = (most for heads_of, most in table[instead] if batch * heads <= (heads_of or math.inf))
    most = next(fits, 0) if table else 0
    of = f"{batch * heads:,} heads on {device.type}"
    return f"up to {most:,} tokens it is sooner for {of}" if tokens <= most else ""
