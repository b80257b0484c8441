"""Linear Log-Normal (LLN) attention: softmax's concentration at linear cost (arXiv 2311.13541).

``import lln`` loads torch and nothing else; ``lln.instruments`` and the like are loaded when they
are first used.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from lln import reference
from lln.eager import first_calls as _first_calls  # noqa: F401 (before any thread is started)
from lln.eager.summary import KeySummary
from lln.errors import (
    BackendUnavailableError,
    CausalStatisticsError,
    InvalidInputError,
    LLNError,
    UnexpectedArgumentError,
)
from lln.functional.decoding import decode_step
from lln.functional.dense import block_diagonal_attention, lln_attention, lln_diag_attention
from lln.functional.exact_keys import choose_keys, lln_keys_attention, lln_keys_attention_varlen
from lln.functional.packed import lln_attention_varlen, lln_diag_attention_varlen
from lln.functional.pages import choose_pages, page_attention, page_attention_varlen
from lln.functional.statistics import match_moments
from lln.functional.windows import window_attention, window_attention_varlen
from lln.matching.calibration import calibrate
from lln.matching.key_calibration import calibrate_keys
from lln.matching.page_index import PageIndex
from lln.nn.heads import LLNCore, LLNDiagCore
from lln.nn.key_heads import LLNKeysCore
from lln.nn.multihead import (
    LLNAttention,
    LLNDiagAttention,
    LLNKeysAttention,
    PageAttention,
    WindowAttention,
)
from lln.nn.window import PageCore, WindowCore

if TYPE_CHECKING:
    from lln import instruments as instruments
    from lln import integrations as integrations
    from lln import parallel as parallel
    from lln import testing as testing

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
    "LLNKeysAttention",
    "LLNKeysCore",
    "PageAttention",
    "PageCore",
    "PageIndex",
    "UnexpectedArgumentError",
    "WindowAttention",
    "WindowCore",
    "__version__",
    "block_diagonal_attention",
    "calibrate",
    "calibrate_keys",
    "choose_keys",
    "choose_pages",
    "decode_step",
    "lln_attention",
    "lln_attention_varlen",
    "lln_diag_attention",
    "lln_diag_attention_varlen",
    "lln_keys_attention",
    "lln_keys_attention_varlen",
    "match_moments",
    "page_attention",
    "page_attention_varlen",
    "reference",
    "window_attention",
    "window_attention_varlen",
]

_LOADED_WHEN_USED = ("instruments", "integrations", "parallel", "testing")


# Hidden from type checkers, which would take every misspelt name for one that is found here.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> ModuleType:
        """Load a package when it is first used."""
        if name in _LOADED_WHEN_USED:
            return import_module(f"lln.{name}")
        raise AttributeError(
            f"module 'lln' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )


def __dir__() -> list[str]:
    """What is there, and what would be loaded."""
    return sorted({*globals(), *_LOADED_WHEN_USED})
