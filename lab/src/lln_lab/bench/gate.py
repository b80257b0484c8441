"""Correctness before speed: an operation that is wrong is not timed.

Error budgets are those of `lln.testing`, for the output and, where a backward is timed, for every
gradient. Two comparisons:

- with the definition, N×N in float64, at the case's own length up to `EXACT_TOKENS`;
- for longer cases of linear operations also at the full shape that is timed, with plain PyTorch in
  float64, which the first comparison has shown to be right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lln.testing import budget, largest_error
from lln_lab.bench.cases import Case
from lln_lab.bench.operations import Operation

EXACT_TOKENS = 300


@dataclass(frozen=True)
class Verdict:
    """The error of an operation against float64, where it is largest relative to its budget.

    Attributes:
        what: ``"output"`` or ``"gradient of …"``.
        error: Largest difference.
        allowed: Its budget.
    """

    what: str = "output"
    error: float = 0.0
    allowed: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the operation may be timed."""
        return self.error <= self.allowed

    @property
    def share(self) -> float:
        """Error in units of the budget."""
        return self.error / self.allowed if self.allowed else float(self.error > 0) * float("inf")


class Checker:
    """Checks cases on one device; small comparisons are made once for all lengths."""

    def __init__(self, device: str) -> None:
        """``device``: ``"cpu"`` or ``"cuda"``."""
        self.device = device
        self._small: dict[Case, Verdict] = {}

    def judge(self, operation: Operation, case: Case, inputs: Sequence[Tensor]) -> Verdict:
        """The worse of the two comparisons.

        Args:
            operation: What is to be timed.
            case: At which shape.
            inputs: The tensors it will be timed on.
        """
        if case.tokens <= EXACT_TOKENS:
            return self._compare(operation, case, inputs, operation.exact)
        own = None
        if operation.linear:
            own = self._compare(operation, case, inputs, operation.plain)
            # Compiling for a second shape takes longer than everything else here, and the plain
            # form of the comparison is the same function that was compiled.
            if not own.passed or operation.is_compiled:
                return own
        small = replace(case, batch=min(case.batch, 2), tokens=EXACT_TOKENS)
        if small not in self._small:
            drawn = operation.layout.make(small, self.device, 1)
            self._small[small] = self._compare(operation, small, drawn, operation.exact)
        return max(filter(None, (own, self._small[small])), key=lambda verdict: verdict.share)

    def _compare(
        self,
        operation: Operation,
        case: Case,
        inputs: Sequence[Tensor],
        judge: Callable[..., Tensor],
    ) -> Verdict:
        few = operation.layout.few
        found, upstream = _run(operation, case, inputs)
        part = few(upstream)
        slices = [few(tensor.detach()) for tensor in inputs]
        wide = [one.double() if one.is_floating_point() else one for one in slices]
        expected = _results(judge, wide, part.double() if case.backward else None)
        # On a CPU ours *is* plain PyTorch: compared with itself it could not fail.
        itself = self.device == "cpu" and operation.kind == "lln"
        plain = (
            None if itself else _results(operation.plain, slices, part if case.backward else None)
        )
        size = max((expected[name].abs().max().item() for name in list(expected)[1:]), default=None)
        verdicts = []
        for what, result in found.items():
            allowed = budget(
                few(result),
                expected[what],
                None if plain is None else plain[what],
                backward=what != "output",
                magnitude=None if what == "output" else size,
            )
            verdicts.append(Verdict(what, largest_error(few(result), expected[what]), allowed))
        return max(verdicts, key=lambda verdict: verdict.share)


def _run(
    operation: Operation, case: Case, inputs: Sequence[Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """The operation's results at full size, and the output gradient that was used."""
    # In every layout the output has the shape of the query.
    upstream = torch.empty_like(inputs[0]).normal_(
        generator=torch.Generator(inputs[0].device).manual_seed(2)
    )

    def prepared(*leaves: Tensor) -> Tensor:
        return operation.run(*operation.prepare(*leaves))

    return _results(prepared, inputs, upstream if case.backward else None), upstream


def _results(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], upstream: Tensor | None
) -> dict[str, Tensor]:
    """Output and, with an output gradient, the gradients of the floating-point inputs, by name."""
    leaves = [
        tensor.detach().requires_grad_(upstream is not None and tensor.is_floating_point())
        for tensor in inputs
    ]
    with torch.set_grad_enabled(upstream is not None):
        out = function(*leaves)
    results = {"output": out.detach()}
    if upstream is not None:
        learnt = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = torch.autograd.grad(out, learnt, upstream)
        for name, gradient in zip(("query", "key", "value"), gradients, strict=True):
            results[f"gradient of {name}"] = gradient
    return results
