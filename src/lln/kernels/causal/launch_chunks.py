"""Causal attention by chunks, from tensors to kernels.

A chunk is one tile of tokens, and one program computes it. The state before every chunk is in
memory: a program per stretch (several chunks) has written it, and a scan has summed up what comes
from other stretches. Calls with a mask, dropout or packed sequences, and gradients of α, β and mix,
are walked instead (`lln.kernels.causal.launch_causal`), as are stretches whose rows lost digits.

A *state* is the summary of all keys before a stretch (a program's share of the tokens); in the
backward pass, what all rows after it contribute to the gradients of keys.

Dimension legend: see `lln.kernels.causal.launch_causal`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lln.kernels.causal.triton_chunk_keys import chunk_key_kernel
from lln.kernels.causal.triton_chunk_outputs import chunk_fwd_kernel
from lln.kernels.causal.triton_chunk_queries import chunk_query_kernel
from lln.kernels.causal.triton_chunk_states import chunk_gather_kernel, chunk_states_kernel
from lln.kernels.causal.triton_walk_states import scan_kernel
from lln.kernels.launching.recipes import Place, Recipe, Step, Workspace, over_tiles
from lln.kernels.launching.sizes import Sizes
from lln.kernels.launching.stretches import cdiv
from lln.kernels.summaries.lln_call import LLNCall

# A state's three tensors; a suffix says which stretches it covers.
STATE = ("p_peak", "p_mass", "p_sum")
# Fewer chunks in a stretch save less time than the scan over the stretches takes.
LEAST_CHUNKS = 16
# With as many heads per multiprocessor, passes over chunks without far states save more time than
# shorter stretches.
LEAST_HEADS = 1.4


class ChunkedCall(NamedTuple):
    """How a causal call is cut.

    Attributes:
        call: What to compute.
        chosen: Its sizes.
        programs: Heads of all samples.
        chunks: Chunks per sequence.
        segments: Stretches per sequence.
        stretch: Tokens per stretch; whole chunks.
    """

    call: LLNCall
    chosen: Sizes
    programs: int
    chunks: int
    segments: int
    stretch: int

    @classmethod
    def of(cls, call: LLNCall, chosen: Sizes) -> ChunkedCall | None:
        """The cut of a call; None if it has to be walked."""
        rows = chosen.chunk.tokens
        plain = call.mask is None and call.bounds is None and call.dropout_p == 0
        # Walks repair whole stretches, and a chunk begins with a block.
        walks = (chosen.walk, chosen.walk_query, chosen.walk_key)
        parts = [tile.tokens for tile in walks]
        if call.block_size:
            parts += [call.block_size, chosen.block_rows]
        if not (chosen.has_chunks and plain) or any(rows % part for part in parts):
            return None
        tokens, programs = call.query.shape[2], call.samples * call.query.shape[1]
        stretch = chosen.chunk_state.stretch(tokens, rows, programs, chosen.cores)
        if programs >= LEAST_HEADS * chosen.cores:
            stretch = cdiv(tokens, rows) * rows
        stretch = max(stretch, LEAST_CHUNKS * rows)
        return cls(call, chosen, programs, cdiv(tokens, rows), cdiv(tokens, stretch), stretch)

    def forward(self, values: dict[str, Any], repair: Step) -> Recipe:
        """The launches of the forward pass; ``repair`` walks the stretches that are lost."""
        values = self._own(values)
        steps, workspace = self._states(values)
        steps.append(self._over_chunks(chunk_fwd_kernel, values, "chunk"))
        return Recipe([*steps, repair], workspace)

    def backward(self, values: dict[str, Any], query_repair: Step, key_repair: Step) -> Recipe:
        """The launches of the backward pass."""
        values = self._own(values)
        steps, workspace = self._states(values)
        rows, chosen = self.call.query.shape[:3], self.chosen
        workspace["p_z"] = rows, exponent_type(self.call.query.dtype)
        workspace |= dict.fromkeys(("p_delta", "p_near", "p_level"), (rows, torch.float32))
        workspace |= dict.fromkeys(("p_chunk_peak", "p_gather_mass"), workspace["p_chunk_top"])
        workspace |= {f"{name}_own": workspace[name] for name in STATE}
        workspace |= {f"{name}_after": workspace[f"{name}_before"] for name in STATE}
        steps += [self._over_chunks(chunk_query_kernel, values, "chunk_query")]
        # Sums behind the chunks take the place of those before them, which nobody needs any more.
        behind = {"p_chunk_mass": Place("p_gather_mass")}
        own = values | behind | state_of("_own")
        grid = (self.segments, self.programs)
        gather = over_tiles(chunk_gather_kernel, grid, own, chosen.chunk_gather)
        steps += [query_repair, gather]
        if self.segments > 1:
            steps.append(scan_step("_own", "_after", self.programs, chosen, values))
        own = values | behind | state_of("_after")
        steps += [self._over_chunks(chunk_key_kernel, own, "chunk_key"), key_repair]
        return Recipe(steps, workspace)

    def _own(self, values: dict[str, Any]) -> dict[str, Any]:
        """What differs from the values of the walks."""
        rows = self.chosen.chunk.tokens
        return values | {
            "EVEN": self.call.query.shape[2] % rows == 0,
            "ONE_BLOCK": self.call.block_size == rows,
            **state_of("_before"),
        }

    def _states(self, values: dict[str, Any]) -> tuple[list[Step], Workspace]:
        """Launches and memory for the state before every chunk, and for marking lost stretches."""
        chosen, low = self.chosen, self.call.query.dtype
        slots = (self.programs, self.chunks, chosen.width)
        sums = low if low == torch.bfloat16 else torch.float32
        workspace: Workspace = {
            f"p_chunk_{name}": (slots, torch.float32) for name in ("top", "mass")
        }
        workspace["p_chunk_sum"] = (*slots, chosen.value_width), sums
        workspace["p_lost"] = (self.programs, self.segments), torch.int32
        part = (self.programs, self.segments, chosen.width) if self.segments > 1 else (1,)
        whole = (*part, chosen.value_width) if self.segments > 1 else part
        shapes = zip(STATE, (part, part, whole), strict=True)
        states: Workspace = {name: (shape, torch.float32) for name, shape in shapes}
        workspace |= states | {f"{name}_before": states[name] for name in STATE}
        workspace["p_sum_before"] = whole, sums
        grid = (self.segments, self.programs)
        own = values | state_of("")
        steps = [over_tiles(chunk_states_kernel, grid, own, chosen.chunk_state)]
        if self.segments > 1:
            steps.append(scan_step("", "_before", self.programs, chosen, values))
        return steps, workspace

    def _over_chunks(self, kernel: Any, values: dict[str, Any], name: str) -> Step:
        grid = (self.chunks, self.programs)
        return over_tiles(kernel, grid, values, getattr(self.chosen, name))


def state_of(suffix: str, parameters: str = "") -> dict[str, Any]:
    """Which state a kernel gets as ``p_peak``, ``p_mass`` and ``p_sum``."""
    return {name + parameters: Place(name + suffix) for name in STATE}


def scan_step(own: str, others: str, programs: int, chosen: Sizes, values: dict[str, Any]) -> Step:
    """Turn every stretch's own state into that of all stretches before (``_after``: after) it."""
    rows = min(8, chosen.width)
    values = values | state_of(own) | state_of(others, "_out")
    values |= {"ROWS": rows, "REVERSE": others == "_after"}
    return Step(scan_kernel, (chosen.width // rows, programs), values, 4)


def exponent_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which differences of exponents of such inputs are computed."""
    return torch.float64 if dtype == torch.float32 else torch.float32
