"""A way to compute calls, as the list of ways (`lln.functional.ways`) asks it; a decided call."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from lln.checks.call import Call
from lln.functional.key_calls import complete
from lln.functional.match import with_temperatures
from lln.functional.one_by_one import no_tokens
from lln.functional.page_calls import with_pages
from lln.observers import announce_call, is_observed
from lln.precision import without_autocast

# The kinds of calls that are attention; the others are parts of it.
ATTENTIONS = ("lln", "diag", "lln_diag", "window", "pages", "lln_keys")


class Way:
    """One way to compute calls of some kinds.

    Whoever writes a new one says what it cannot do (`why_not`), when it is worth it (`pays`), what
    depends on shapes and options only (`prepare`), and computes (`attend_dense`, `attend_packed`).

    Attributes:
        name: What it is called in sentences.
        impl: The value of ``impl`` that names it.
        kinds: The kinds of calls that it knows.
        is_whole: Whether every part runs this way, so that ``impl`` may name it.
        is_automatic: Whether ``impl="auto"`` takes it where it pays.
    """

    name: str
    impl: str
    kinds: tuple[str, ...]
    is_whole = True
    is_automatic = True

    def serves(self, kind: str, impl: str) -> bool:
        """Whether a call of a kind may be asked for like this."""
        if kind not in self.kinds:
            return False
        return self.is_automatic if impl == "auto" else self.is_whole and impl == self.impl

    def why_not(self, call: Call) -> str | None:
        """Why it cannot compute a call, as the middle of a sentence; None if it can."""
        return None

    def pays(self, call: Call) -> bool:
        """Whether ``impl="auto"`` should take it for a call that it can compute."""
        return True

    def prepare(self, call: Call) -> Prepared:
        """Everything about a call that does not depend on the numbers in its tensors."""
        return Prepared(self, call.block_size)

    def describe(self, prepared: Prepared) -> str:
        """A sentence on what computes a prepared call."""
        return f"Computed by: {self.name}."

    def run(self, call: Call, prepared: Prepared) -> Tensor:
        """Match and choose what is missing, tell observers, and attend."""
        if call.kind == "lln_keys":
            call = complete(call, prepared.impl)
        elif call.kind == "pages" and call.bounds is None:
            call = with_pages(call, prepared.impl)
        else:
            call = with_temperatures(call, prepared.impl)
        if is_observed():
            announce_call(call)
        if call.bounds is None:
            return self.attend_dense(call, prepared)
        if call.query.shape[0] == 0:
            return no_tokens(call)
        return self.attend_packed(call, prepared)

    def attend_dense(self, call: Call, prepared: Prepared) -> Tensor:
        """``[B, H, T, E]`` of a call that lacks nothing but, of a packed sequence, pages."""
        raise NotImplementedError

    def attend_packed(self, call: Call, prepared: Prepared) -> Any:
        """``[T, H, E]`` of packed sequences with a token, which lack nothing but pages."""
        raise NotImplementedError


class Prepared(NamedTuple):
    """What `lln.functional.ways` found for calls of one layout; ``str`` says it in one sentence.

    Attributes:
        way: What computes the call.
        block_size: Tokens in a block; for kernels at most the length of the longest sequence.
        diagonal: For kernels what computes the blocks: ``"joint"``, those of LLN attention in the
            same pass; ``"separate"``, kernels of their own; ``"tiled"``, kernels that go over
            blocks tile by tile; ``"added"``, the same, in place; ``"eager"``, PyTorch; None if
            there are none.
        value_width: Channels of the values that one launch of LLN attention takes.
        block_value_width: The same for a launch of the kernels for blocks alone.
        how: How the way goes about it, where there are several possibilities; in words.
        repeat: The launches of the first such call, ready to be repeated; None if it left none.
    """

    way: Way
    block_size: int = 0
    diagonal: str | None = None
    value_width: int = 0
    block_value_width: int = 0
    how: tuple[str, ...] = ()
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
