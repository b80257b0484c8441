"""The attention cores of a window, alone or with sinks and pages: nothing to match.

Dimension legend: B batch, H heads, Hk key heads, T tokens, D head width, E value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln import checks
from lln.checks.call import Call
from lln.checks.page_options import check_last_queries
from lln.checks.signatures import check_options, explain_misfits
from lln.functional.run import attend
from lln.nn.heads import AttentionCore


class WindowCore(AttentionCore):
    """Softmax attention inside a sliding window, over heads that are already projected.

    The module of `lln.window_attention`. It has no α, β, parameters or buffers.

    Args:
        num_heads: H.
        head_dim: D.
        window: How many tokens a query sees on either side of its own, or before its own in causal
            calls.
        scale: Factor of the scores; None = 1/√D.
        dropout: Probability to drop a whole key in training (see `lln.eager.dropout`).
        impl: As in `lln.lln_attention`.
        device: As every core takes it; there is nothing to place.

    Example:
        >>> core = WindowCore(2, 16, window=8)
        >>> query, key, value = torch.randn(3, 1, 2, 100, 16)
        >>> core(query, key, value).shape
        torch.Size([1, 2, 100, 16])
    """

    @explain_misfits
    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        window: int = 64,
        scale: float | None = None,
        dropout: float = 0.0,
        impl: str = "auto",
        device: torch.device | str | None = None,
    ) -> None:
        """Check the options."""
        super().__init__(num_heads, head_dim, dropout=dropout, impl=impl)
        checks.check_count("window", window, least=0)
        checks.check_scale(scale)
        self.window, self.scale = window, scale

    def _attend(self, call: Call) -> Tensor:
        checks.check_self_attention(call.query, call.key, type(self).__name__)
        call = call.replace(kind="window", window=self.window, scale=self.scale)
        return attend(call, self.impl)

    def extra_repr(self) -> str:
        """The settings, for ``print(module)``."""
        return f"{super().extra_repr()}, window={self.window}"


class PageCore(WindowCore):
    """Softmax attention to a window, sinks and chosen pages, over heads already projected.

    The module of `lln.page_attention`. It has no α, β, parameters or buffers.

    Args:
        num_heads: H.
        head_dim: D.
        window: As in `WindowCore`.
        sinks: How many first tokens of its sequence every query sees.
        pages: How many pages every query chooses.
        page_size: Tokens in a page.
        **options: As in `WindowCore`: ``scale``, ``dropout``, ``impl``, ``device``.

    Example:
        >>> import torch
        >>> core = PageCore(2, 16, window=8, pages=4)
        >>> query, key, value = torch.randn(3, 1, 2, 100, 16)
        >>> core(query, key, value).shape
        torch.Size([1, 2, 100, 16])
    """

    @explain_misfits
    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        window: int = 128,
        sinks: int = 16,
        pages: int = 16,
        page_size: int = 16,
        **options: Any,
    ) -> None:
        """Check the options."""
        check_options(self, options, type(self))
        super().__init__(num_heads, head_dim, window=window, **options)
        checks.check_count("sinks", sinks, 0)
        checks.check_count("pages", pages, 0)
        checks.check_count("page_size", page_size)
        self.sinks, self.pages, self.page_size = sinks, pages, page_size

    def _attend(self, call: Call) -> Tensor:
        check_last_queries(call.query, call.key, type(self).__name__)
        if not call.is_causal:
            checks.check_self_attention(call.query, call.key, type(self).__name__)
        form = {"sinks": self.sinks, "keys": self.pages, "page_size": self.page_size}
        call = call.replace(kind="pages", window=self.window, scale=self.scale, **form)
        return attend(call, self.impl)

    def extra_repr(self) -> str:
        """The settings, for ``print(module)``."""
        form = f"sinks={self.sinks}, pages={self.pages}, page_size={self.page_size}"
        return f"{super().extra_repr()}, {form}"
