"""Softmax attention to a window and to pages that every query chooses by their best token."""

from torch import Tensor

from lln.checks import check_count
from lln.eager.run import repeat_heads
from lln.functional.pages import choose_pages, page_attention
from lln.reference import page_pairs
from lln_lab.peers.masked import softmax_matrix
from lln_lab.peers.peer import Card, Core, Host, Mask, visible


class Pages(Core):
    """Softmax attention to the tokens nearby, the first tokens, and P pages of p tokens.

    Args:
        window: How many tokens a query sees on either side of its own; before its own where the
            host is causal.
        sinks: How many first tokens every query sees.
        pages: P, how many pages every query chooses, by their best token.
        page_size: p, tokens in a page.
    """

    card = Card(
        name="pages",
        title="Window, sinks and pages",
        citation="this project; pages by their mean: Lu et al. 2025 (MoBA), arXiv 2502.13189",
        equation="P = softmax(QKᵀ/√d) over |i − j| ≤ w, j < s and the chosen pages, 0 elsewhere",
        complexity="O(N² d) to choose, without exponentials; O(N (w + s + Pp) d) to attend",
        is_linear=False,
        repeats_on_gpu=False,
        oracle="dense form; softmax where the pages hold all tokens",
    )

    def __init__(
        self,
        host: Host,
        *,
        window: int = 64,
        sinks: int = 0,
        pages: int = 16,
        page_size: int = 16,
    ) -> None:
        super().__init__(host)
        check_count("window", window, 0)
        check_count("sinks", sinks, 0)
        check_count("pages", pages, 0)
        check_count("page_size", page_size)
        self.pages = pages
        self.form = {"window": window, "sinks": sinks, "page_size": page_size}

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask = None) -> Tensor:
        options = {"key_mask": key_mask, "is_causal": self.host.is_causal}
        return page_attention(query, key, value, pages=self.pages, **self.form, **options)

    def matrix(self, query: Tensor, key: Tensor, key_mask: Mask = None) -> Tensor:
        options = {"key_mask": key_mask, "is_causal": self.host.is_causal}
        pages = choose_pages(query, key, self.pages, **self.form, **options)
        pages = repeat_heads(pages, query.shape[1])
        pairs = page_pairs(pages, key.shape[2], **self.form, **options)
        return softmax_matrix(query, key, visible(query, key_mask, self.host.is_causal, pairs))
