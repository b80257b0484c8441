"""Causal kernels by chunks: states in memory, then one program for every chunk.

A chunk is one tile of tokens. First one program per stretch writes the state before each of its
chunks; then every chunk is computed by itself, all at once. That moves more memory than a walk
(`lln.kernels.triton.causal_walks`), which carries its state on the chip, and waits less. Stretches
whose rows lost digits are walked again, exactly.

x = α q and y = β k throughout; dimension legend: see `lln.kernels.triton.steps`.
"""

from lln.kernels.triton.causal_chunks.chunk_keys import chunk_key_kernel
from lln.kernels.triton.causal_chunks.chunk_outputs import chunk_fwd_kernel
from lln.kernels.triton.causal_chunks.chunk_queries import chunk_query_kernel
from lln.kernels.triton.causal_chunks.chunk_states import chunk_gather_kernel, chunk_states_kernel

__all__ = [
    "chunk_fwd_kernel",
    "chunk_gather_kernel",
    "chunk_key_kernel",
    "chunk_query_kernel",
    "chunk_states_kernel",
]
