"""What every entry point accepts, and the one-sentence errors for everything else.

``arguments`` checks the arguments of an attention call, ``bounds`` the bounds of packed sequences,
``tensors`` that a tensor is dense and has the right axes, ``names`` a choice among names,
``signatures`` explains a call that does not fit its function, ``reading`` reads files that somebody
else may have written, and ``schema`` compares what they hold with what is expected.
"""

from lln.checks.arguments import (  # noqa: F401
    check_block_size,
    check_blocks,
    check_causal,
    check_count,
    check_dropout,
    check_flag,
    check_impl,
    check_key_mask,
    check_matching,
    check_mix,
    check_qkv,
    check_scale,
    check_self_attention,
    check_temperature,
)
from lln.checks.tensors import FLOAT_DTYPES, shape_of, wrong_device, wrong_dtype  # noqa: F401
