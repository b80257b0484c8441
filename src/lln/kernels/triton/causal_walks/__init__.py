"""Causal kernels: a program walks over the tiles of its stretch and updates a summary on the way.

A stretch is a program's share of the tokens; the walk's state is the summary of all earlier keys.
`tiles` has the steps of a walk, the equations of a row and the guard that detects when a row has
lost its digits; `exact` has the scores that repair it; `states` the state a stretch starts from.
The walks are `outputs` in the forward pass; in the backward pass `queries` for dq, then `keys` for
dk and dv, which starts from what `gathering` has summed over the later stretches.

x = α q and y = β k throughout; dimension legend: see `lln.kernels.triton.steps`; every query head
has its own walk, and KG of them share a key head.
"""

from lln.kernels.triton.causal_walks.gathering import causal_gather_kernel
from lln.kernels.triton.causal_walks.keys import causal_key_kernel
from lln.kernels.triton.causal_walks.outputs import causal_fwd_kernel
from lln.kernels.triton.causal_walks.queries import causal_query_kernel
from lln.kernels.triton.causal_walks.states import scan_kernel

__all__ = [
    "causal_fwd_kernel",
    "causal_gather_kernel",
    "causal_key_kernel",
    "causal_query_kernel",
    "scan_kernel",
]
