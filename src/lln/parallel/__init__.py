"""Context parallelism: the attentions of the top level, for sequences that lie on several ranks."""

from lln.parallel.collectives import sum_gradients
from lln.parallel.sharded import lln_attention, lln_diag_attention
from lln.parallel.sharded_keys import lln_keys_attention

__all__ = ["lln_attention", "lln_diag_attention", "lln_keys_attention", "sum_gradients"]
