"""Statistics of queries and keys for modules and instruments, apart from a call of attention.

Dimension legend: as in `lln.checks.call`.
"""

from __future__ import annotations

from torch import Tensor

from lln import checks
from lln.checks.call import Call
from lln.checks.names import check_choice
from lln.functional import ways
from lln.functional.match import match_inputs, measure_heads
from lln.matching.moments import Moments, head_temperatures, matched, tensor_moments
from lln.precision import without_autocast


def match_moments(
    query: Tensor,
    key: Tensor,
    *,
    criterion: str = "variance",
    scope: str = "head",
    key_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """α and β that give LLN attention the concentration softmax attention has on these inputs.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, S, D]``; H a multiple of Hk (GQA).
        criterion: ``"variance"``: the variance of log P inside a row equals that of softmax
            attention, for every D; ``"entropy"``: the mean row entropy does; ``"paper"``: the
            authors' constants in Eq. (10), fitted at D = 64.
        scope: ``"head"``: separate statistics for every sample and head, so that a sample never
            depends on its batch-mates; ``"tensor"``: one standard deviation of the whole tensor, as
            in the authors' code, kept for parity.
        key_mask: bool ``[B, S]``, True = attend. Only valid tokens count; if T = S (self
            attention) the mask applies to the queries too.

    Returns:
        ``(alpha, beta)``, each ``[B, H, 1, 1]`` (``[1, 1, 1, 1]`` for scope ``"tensor"``),
        detached. Where the queries or keys are constant, both are 1. NaN or infinity in a valid
        token makes them NaN or infinite, with scope ``"head"`` only for its sample and head.

    Example:
        >>> import torch
        >>> generator = torch.Generator().manual_seed(0)
        >>> q, k = torch.randn(2, 1, 1, 512, 64, generator=generator)
        >>> alpha, beta = match_moments(q, k)
        >>> f"{alpha.item():.1f} {beta.item():.1f}"
        '2.3 2.3'
    """
    checks.check_qkv(query, key, key, layout="dense", enable_gqa=True)
    checks.check_key_mask(key_mask, key)
    checks.check_matching(criterion)
    check_choice("scope", scope, ("head", "tensor"))
    with without_autocast(query):
        if scope == "tensor":
            return matched(tensor_moments, query, key, key_mask, criterion=criterion)
        if criterion == "paper":
            return head_temperatures(query, key, key_mask, criterion)
        return matched_temperatures(query, key, criterion, key_mask, "auto")


def matched_temperatures(
    query: Tensor, key: Tensor, matching: str, key_mask: Tensor | None, impl: str
) -> tuple[Tensor, Tensor]:
    """α and β ``[B, H, 1, 1]`` of dense queries and keys, by what ``impl`` asks for."""
    call = Call("temperatures", query, key, key, matching=matching, key_mask=key_mask)
    return match_inputs(query, key, matching, key_mask, ways.prepare(call, impl).impl)


def measured_moments(query: Tensor, key: Tensor, key_mask: Tensor | None, impl: str) -> Moments:
    """The moments of every head, by what ``impl`` asks for."""
    call = Call("moments", query, key, key, key_mask=key_mask)
    return measure_heads(query, key, key_mask, ways.prepare(call, impl).impl)
