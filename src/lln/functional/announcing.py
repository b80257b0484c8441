"""Tells observers of a completed call."""

from __future__ import annotations

from typing import Any

from lln.checks.call import Call
from lln.observers import Announcement, announce


def announce_call(call: Call) -> None:
    """Announce a call with everything in place; asked only while somebody listens."""
    parts: dict[str, Any] = {"key_mask": call.key_mask, "is_causal": call.is_causal}
    parts["cu_seqlens"] = call.bounds
    if call.has_temperatures:
        parts |= {"alpha": call.alpha, "beta": call.beta}
    if call.kind != "lln":
        parts["scale"] = call.scale
    if call.block_size:
        parts["block_size"] = call.block_size
    if call.kind in ("window", "pages"):
        parts["window"] = call.window
    if call.kind == "pages":
        parts |= {"sinks": call.sinks, "page_size": call.page_size}
        parts["indices"] = call.keys if call.bounds is None else None
    if call.kind == "lln_diag":
        parts["mix"] = call.mix
    if call.kind == "lln_keys":
        parts |= {"offset": call.offset, "indices": call.keys}
        parts["group_size"] = call.group_size
    announce(Announcement(call.kind, call.query, call.key, **parts))
