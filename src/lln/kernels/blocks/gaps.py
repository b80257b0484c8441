"""The launch that finds where diagonal blocks begin under a mask.

A separate launch, because a search inside the kernels would take registers that they need.
"""

from __future__ import annotations

import torch

from lln.kernels.blocks.triton_gaps import LOOK, gap_kernel
from lln.kernels.launching.recipes import Step, Workspace
from lln.kernels.summaries.lln_call import LLNCall


def find_gaps(samples: int, tokens: int, block_size: int) -> tuple[list[Step], Workspace]:
    """The launch that writes ``p_starts``, and the memory for it."""
    values = {"tokens": tokens, "block_size": block_size, "LOOK": LOOK}
    workspace: Workspace = {"p_starts": ((samples,), torch.int32)}
    return [Step(gap_kernel, (samples,), values, 4)], workspace


def starts_of(call: LLNCall) -> tuple[list[Step], Workspace]:
    """The same for a call; nothing where blocks begin with the sequences, as ``bounds`` say."""
    if not call.is_shifted:
        return [], {}
    return find_gaps(call.samples, call.key.shape[2], call.block_size)
