"""A call that has been decided: which way computes it, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from lln.functional.call import Call
from lln.precision import without_autocast

if TYPE_CHECKING:
    from lln.functional.way import Way


class Prepared(NamedTuple):
    """What `lln.functional.ways` found for calls of one layout; ``str`` says it in one sentence.

    Attributes:
        way: What computes the call.
        block_size: Tokens in a block; for kernels at most the length of the longest sequence.
        diagonal: For kernels what computes the blocks: ``"joint"``, those of LLN attention in the
            same pass; ``"separate"``, kernels of their own; ``"added"``, kernels that go over
            blocks tile by tile and add them in place; ``"eager"``, PyTorch; None if there are none.
        value_width: Channels of the values that one launch of LLN attention takes.
        block_value_width: The same for a launch of the kernels for blocks alone.
        rest: What plain PyTorch computes beside compiled passes, in words.
        repeat: The launches of the first such call, ready to be repeated; None if it left none.
    """

    way: Way
    block_size: int = 0
    diagonal: str | None = None
    value_width: int = 0
    block_value_width: int = 0
    rest: tuple[str, ...] = ()
    repeat: Any = None

    @property
    def impl(self) -> str:
        """``"eager"``, ``"cpu"``, ``"triton"`` or ``"reference"``."""
        return self.way.impl

    def __str__(self) -> str:
        """One sentence."""
        return self.way.describe(self)

    def run(self, call: Call) -> Tensor:
        """Compute a call of this layout."""
        if self.repeat is not None and self.repeat.is_free():
            out: Tensor = self.repeat.run(call)
            return out
        with without_autocast(call.query):
            return self.way.run(call, self)
