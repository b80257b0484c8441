"""A way to compute calls, as the list of ways (`lln.functional.ways`) asks it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lln.functional.announcing import announce_call
from lln.functional.call import Call
from lln.functional.match import with_temperatures
from lln.functional.one_by_one import no_tokens
from lln.functional.prepared import Prepared


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
        del call
        return None

    def pays(self, call: Call) -> bool:
        """Whether ``impl="auto"`` should take it for a call that it can compute."""
        del call
        return True

    def prepare(self, call: Call) -> Prepared:
        """Everything about a call that does not depend on the numbers in its tensors."""
        return Prepared(self, call.block_size)

    def describe(self, prepared: Prepared) -> str:
        """A sentence on what computes a prepared call."""
        raise NotImplementedError

    def run(self, call: Call, prepared: Prepared) -> Tensor:
        """Match α and β where they are missing, tell observers, and attend."""
        call = with_temperatures(call, prepared.impl)
        announce_call(call)
        if call.bounds is None:
            return self.attend_dense(call, prepared)
        if call.query.shape[0] == 0:
            return no_tokens(call)
        return self.attend_packed(call, prepared)

    def attend_dense(self, call: Call, prepared: Prepared) -> Tensor:
        """``[B, H, T, E]`` of a call whose α and β are known."""
        raise NotImplementedError

    def attend_packed(self, call: Call, prepared: Prepared) -> Any:
        """``[T, H, E]`` of packed sequences with at least one token, α and β known."""
        raise NotImplementedError
