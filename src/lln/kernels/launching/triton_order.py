"""One launch after another without a pause: the next one is made ready while this one still runs.

The GPU then starts the programs of the next launch as soon as those of this one have ended, and the
programs wait until what this one wrote can be read. That needs a GPU from Hopper on and is called
programmatic dependent launch. `recipes.Recipe` decides which launches follow so.
"""

from __future__ import annotations

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_wait
except ImportError:  # Triton before 3.4
    gdc_wait = None

HAS_FOLLOWERS = gdc_wait is not None


@triton.jit
def wait_for_launch(FOLLOWS: tl.constexpr):
    """Wait until the launch before has ended; the first thing that a kernel does."""
    if FOLLOWS:
        gdc_wait()
