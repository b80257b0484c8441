"""Time and memory of one layer of any attention system at one shape.

If the layers of a system differ, it is the mean over one period of them.

Cores and mixers are measured as `lln_lab.peers.build` returns them, projections included. A block
includes a feed-forward, so blocks are measured as a whole encoder layer, and `FRAME`, softmax
attention with its feed-forward, is the row to compare them with.

Dimension legend: B batch, N tokens, W width of the tokens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lln_lab import peers
from lln_lab.bench.result_rows import Row, last_shorter, measured_row
from lln_lab.bench.spread import timed
from lln_lab.bench.timing import bind, milliseconds, peak_bytes

# Softmax attention, residuals, norms and feed-forward: what a block replaces.
FRAME = "softmax_layer"
ALONE, FILLED = "batch 1", "filled"
PASSES = ("forward", "both")
# What a row of the results says about its cell.
PEER_FORM = {
    "part": frozenset([ALONE, FILLED]),
    "system": frozenset([*peers.available(), FRAME]),
    "passes": frozenset(PASSES),
}

# A cell is skipped if the next shorter one predicts a call that takes this many times the limit.
_HOPELESS = 3.0
# Calls longer than these seconds are timed three times with a plain clock: launch overhead is then
# negligible, and torch's timer would repeat the call ten times.
_BRIEF = {"cpu": 0.2, "cuda": 0.02}
# Most seconds to draw a layer's weights, which may be N×N.
_SETUP_LIMIT = 10.0
_USABLE = 0.6


@dataclass(frozen=True)
class LayerSize:
    """Width and heads of the layer, and the dtype of its weights and tokens."""

    width: int
    heads: int
    dtype: str


@dataclass(frozen=True)
class PeerCell:
    """One cell of the tables."""

    part: str
    system: str
    passes: str
    batch: int
    tokens: int

    @property
    def name(self) -> str:
        """How the cell is printed and found again in the results."""
        return f"{self.part}: {self.system} {self.passes} B{self.batch} N{self.tokens}"


def layers_of(system: str) -> int:
    """How many layers are measured at once: one, or one period if layers differ."""
    return 1 if system == FRAME else peers.card(system).period


def build_layers(system: str, size: LayerSize, tokens: int, **options: Any) -> nn.Module:
    """A module with `layers_of` layers of a system or of `FRAME`, called with ``[B, N, W]``.

    N is at most ``tokens``; ``options`` are those of the system.
    """
    sizes: dict[str, Any] = options | {
        "embed_dim": size.width,
        "num_heads": size.heads,
        "max_len": tokens,
    }
    layers = layers_of(system)
    if system == FRAME:
        return peers.Encoder("softmax", depth=1, **sizes)
    if peers.card(system).kind == "block":
        return peers.Encoder(system, depth=layers, **sizes)
    built = (peers.build(system, **sizes, layer=n, layers=layers) for n in range(layers))
    return nn.Sequential(*built)


def is_linear(system: str) -> bool:
    """Whether its card says that time grows no faster than N log N."""
    return system != FRAME and peers.card(system).is_linear


def measure_cell(cell: PeerCell, size: LayerSize, device: str, seconds: float, limit: float) -> Row:
    """Median milliseconds and peak bytes, or the reason why there are none.

    Calls are repeated for ``seconds``; a call that takes longer than ``limit`` is not repeated.
    """
    return measured_row(cell, lambda row: row.update(_measure(cell, size, device, seconds, limit)))


def _measure(cell: PeerCell, size: LayerSize, device: str, seconds: float, limit: float) -> Row:
    torch.manual_seed(0)
    begin = time.perf_counter()
    dtype, backward = getattr(torch, size.dtype), cell.passes == "both"
    # Weights are drawn on the device itself: on a GPU that takes no time.
    with torch.device(device):
        layers = build_layers(cell.system, size, cell.tokens)
    layers = layers.to(device, dtype).train(backward)
    x = torch.randn(cell.batch, cell.tokens, size.width, device=device, dtype=dtype)
    weights = sum(one.nbytes for one in (*layers.parameters(), *layers.buffers()))
    row: Row = {"setup_seconds": time.perf_counter() - begin, "weights_bytes": weights}
    x.requires_grad_(backward)
    learnt = [x, *(weight for weight in layers.parameters() if weight.requires_grad)]
    call = bind(lambda: layers(x), learnt, x if backward else None)
    brief = _BRIEF[device]
    spent = _seconds_of(call)
    if spent >= min(limit, brief):
        # The first call also compiles kernels.
        spent = min(spent, _seconds_of(call))
    if spent >= limit:
        return {**row, **over(limit)}
    on_gpu, count = device == "cuda", layers_of(cell.system)
    # The tokens, and the output gradient of the same size.
    held = weights + (1 + backward) * x.nbytes
    row["peak_bytes"] = (held + peak_bytes(call, on_gpu)) / count
    if spent >= brief:
        found = timed((spent, _seconds_of(call), _seconds_of(call))).times(1e3)
    else:
        found = milliseconds(call, seconds, on_gpu)
    return {**row, **found.times(1 / count).fields("milliseconds"), "status": "timed"}


def _seconds_of(call: Callable[[], Tensor]) -> float:
    """Wall time of one call, without the check of its output."""
    begin = time.perf_counter()
    out = call()
    if out.is_cuda:
        torch.cuda.synchronize()
    spent = time.perf_counter() - begin
    if not out.isfinite().all().item():
        raise FloatingPointError("the output is not finite")
    return spent


def over(limit: float) -> Row:
    """The status of a cell that takes too long."""
    return {"status": f"over {limit:g} s"}


def foreseen(cell: PeerCell, rows: Sequence[Row], device: str, limit: float) -> Row | None:
    """The row of a cell that shorter sequences show is not worth trying; None = try it.

    ``rows`` are measured rows; one call may take ``limit`` seconds.
    """
    for row in rows:
        if row["system"] == cell.system and row.get("fatal"):
            # A system that crashed the process once would waste minutes if tried at every length.
            return {"status": "failed", "reason": f"not tried after {row['name']}"}
    last = last_shorter(rows, cell, "part", "system", "passes")
    if last is None or last["status"] == "failed":
        return None
    where = f"N = {last['tokens']}"
    if last["status"] != "timed":
        return {"status": last["status"], "reason": f"so it was at {where}"}
    longer = cell.tokens / last["tokens"]
    more = longer * cell.batch / last["batch"] * (1.0 if is_linear(cell.system) else longer)
    foretold = f"foretold from {where}"
    memory = _memory(device)
    if last["weights_bytes"] * longer**2 > memory:
        return {"status": "out of memory", "reason": f"weights, {foretold}"}
    # A GPU raises an error when it is full, but on a CPU the process is killed.
    if device == "cpu" and last["peak_bytes"] * more > _USABLE * memory:
        return {"status": "out of memory", "reason": foretold}
    if last["milliseconds"] * more > _HOPELESS * 1e3 * limit:
        return over(limit) | {"reason": foretold}
    if last["setup_seconds"] * longer**2 > _SETUP_LIMIT and last["weights_bytes"] > 1e9:
        return over(_SETUP_LIMIT) | {"reason": f"drawing the weights, {foretold}"}
    return None


def _memory(device: str) -> int:
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
