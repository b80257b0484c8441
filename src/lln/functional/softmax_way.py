"""The way that runs softmax itself, where a converted model may and nothing is sooner.

Up to how many tokens that is so was measured: ``crossings.json``, which
``python -m lln_lab.benchmarks.short_calls`` fills. Its row for pages is read off what
``python -m lln_lab.benchmarks.page_times`` says of forward passes.
"""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any

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

_ENGINES = {"cpu": CompiledKeys(), "cuda": KeyKernels()}
# Causal texts with padding need a mask of all pairs: up to so many tokens a small one.
_MOST_PADDED = 1024

# By chip or kind of device, and by what would run instead: most channels, most tokens.
CROSSINGS: dict[str, Any] = json.loads(
    resources.files("lln.functional").joinpath("crossings.json").read_text("utf-8")
)["crossings"]


class Softmax(Way):
    """Softmax itself, where a converted layer may run it and exact keys or pages are not sooner."""

    name = "softmax itself"
    impl = "eager"
    kinds = ("lln_keys", "pages")
    is_whole = False

    def why_not(self, call: Call) -> str | None:
        """See `Way.why_not`."""
        if not call.or_softmax:
            return "is not allowed to replace exact keys or pages by softmax here"
        if is_observed() or not is_untraced(*call.qkv, call.key_mask):
            return "runs nothing where somebody watches"
        query, width = call.query, call.value.shape[-1]
        is_fused = not query.is_cuda or (width <= 256 and query.dtype != torch.float64)
        if call.is_causal and query.shape[2] != call.key.shape[2]:
            return "takes no cache"
        fits = is_fused and call.bounds is None and query.shape[-1] == width
        if call.is_causal and call.key_mask is not None:
            fits = fits and query.shape[2] <= _MOST_PADDED
        return None if fits else "would hold all pairs of tokens at once"

    def pays(self, call: Call) -> bool:
        """Where softmax was measured to be sooner, or all keys would be exact anyhow."""
        return bool(_why(call))

    def prepare(self, call: Call) -> Prepared:
        """See `Way.prepare`."""
        return Prepared(self, how=(_why(call),))

    def describe(self, prepared: Prepared) -> str:
        """See `Way.describe`."""
        return f"{': '.join(('Softmax itself computes the call', *prepared.how))}."

    def run(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.run`; without α and β."""
        del prepared
        return softmax_attention(*call.qkv, call.key_mask, call.is_causal, call.scale)


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention, Eq. (1). As everywhere: no keys, zeros."""
    mask: Tensor | None = None
    is_shared = key.shape[1] != query.shape[1]
    if key_mask is not None:
        # 0 · NaN would be NaN. Of a text without keys this averages zeros.
        there = key_mask[:, None, :, None]
        key, value = torch.where(there, key, 0.0), torch.where(there, value, 0.0)
        mask = (key_mask | ~key_mask.any(1, keepdim=True))[:, None, None, :]
        if is_causal:
            # Not every kernel of PyTorch takes both. A row that sees nothing averages zeros, too.
            mask = mask & query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
            mask = mask | (~mask.any(-1, keepdim=True) & ~key_mask[:, None, None, :])
            is_causal = False
    # PyTorch's fused kernels share heads on a GPU only, without a mask and in half types.
    if is_shared and (mask is not None or not query.is_cuda or query.dtype.itemsize > 2):
        key, value = (repeat_heads(side, query.shape[1]) for side in (key, value))
        is_shared = False
    if scale is None and not is_shared:
        # Reading names takes PyTorch as long as the rest of the way here.
        return F.scaled_dot_product_attention(query, key, value, mask, 0.0, is_causal)
    options = {"scale": scale, "enable_gqa": is_shared}
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, **options)


def _why(call: Call) -> str:
    """Why softmax is taken, in words; empty if it is not."""
    batch, heads, tokens, width = call.query.shape
    device = call.query.device
    if call.kind == "pages":
        instead = "pages"
        # Looking both ways, pages are cut by the window on either side.
        seen = call.keys * call.page_size + (call.window + 1 if call.is_causal else 0)
        if tokens <= seen:
            return "the window and pages would hold every token"
        if call.key_mask is not None or call.query.dtype.itemsize > 2:
            return ""
    else:
        engine = _ENGINES.get(device.type)
        is_compiled = engine is not None and engine.why_not(call) is None
        instead = "compiled" if is_compiled else "plain"
        # All blocks but one. Compiled passes may be sooner than softmax there: the table says.
        others = (tokens - 1) // call.block_size * call.block_size
        has_all = isinstance(call.keys, int) and call.keys >= others
        if has_all and (device.type, instead) != ("cpu", "compiled"):
            return "blocks and exact keys would hold every token"
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    rows = CROSSINGS.get(chip, CROSSINGS.get(device.type, {})).get(instead, [])
    count = batch * heads * width
    most = next((most for channels, most in rows if count <= (channels or math.inf)), 0)
    reason = f"up to {most:,} tokens it is sooner for {count:,} channels on {device.type}"
    return reason if tokens <= most else ""
