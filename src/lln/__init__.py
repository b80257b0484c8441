"""Linear Log-Normal (LLN) attention: softmax's concentration at linear cost (arXiv 2311.13541).

``import lln`` loads torch and nothing else.
"""

from lln import first_calls as _first_calls  # noqa: F401 (before any thread is started)
from lln import reference
from lln.attention import block_diagonal_attention, lln_attention, lln_diag_attention
from lln.calibration import calibrate
from lln.core import LLNCore, LLNDiagCore
from lln.decoding import decode_step
from lln.errors import (
    BackendUnavailableError,
    CausalStatisticsError,
    InvalidInputError,
    LLNError,
    UnexpectedArgumentError,
)
from lln.matching import match_moments
from lln.modules import LLNAttention, LLNDiagAttention
from lln.summary import KeySummary
from lln.varlen import lln_attention_varlen, lln_diag_attention_varlen

__version__ = "0.1.0.dev0"

__all__ = [
    "BackendUnavailableError",
    "CausalStatisticsError",
    "InvalidInputError",
    "KeySummary",
    "LLNAttention",
    "LLNCore",
    "LLNDiagAttention",
    "LLNDiagCore",
    "LLNError",
    "UnexpectedArgumentError",
    "__version__",
    "block_diagonal_attention",
    "calibrate",
    "decode_step",
    "lln_attention",
    "lln_attention_varlen",
    "lln_diag_attention",
    "lln_diag_attention_varlen",
    "match_moments",
    "reference",
]
