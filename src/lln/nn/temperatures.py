"""Where a module's α and β come from: the sample, a running average, a buffer or a parameter.

Each class maps ``(query, key, key_mask, is_causal)`` to ``(alpha, beta)``.

Dimension legend: B batch, H heads, T queries, S keys, D head width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lln import checks
from lln.checks.names import check_choice, shown
from lln.errors import CausalStatisticsError, InvalidInputError
from lln.functional.statistics import matched_temperatures, measured_moments
from lln.matching.curves import matched_spread
from lln.matching.moments import Moments, temperatures
from lln.precision import without_autocast
from lln.tracing import in_backward, is_compiling

# Forwards whose backward may still be pending, as in pipelines and gradient accumulation.
_REMEMBERED = 1024

# A compiled graph keeps the state of one forward, uncompiled code that of many.
_ONE_PENDING = (
    "running statistics inside torch.compile inside activation checkpointing need every backward "
    "right after its forward; checkpoint inside the compiled function instead"
)

STATISTICS = ("sample", "running", "fixed", "learned")


class SampleStatistics(nn.Module):
    """α, β matched to every sample and head separately; keeps no state."""

    def __init__(self, criterion: str = "variance", *, impl: str = "auto") -> None:
        """Check and keep the criterion (see `lln.match_moments`) and the implementation."""
        super().__init__()
        checks.check_matching(criterion)
        self.criterion, self.impl = criterion, impl

    def forward(
        self, query: Tensor, key: Tensor, key_mask: Tensor | None = None, is_causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        """α, β of shape ``[B, H, 1, 1]`` (one value for all with ``"paper"``)."""
        if is_causal:
            raise CausalStatisticsError(
                "statistics='sample' would let every row of a causal sequence see the future; use "
                "statistics='running', 'fixed' or 'learned'."
            )
        with without_autocast(query):
            return matched_temperatures(query, key, self.criterion, key_mask, self.impl)

    def extra_repr(self) -> str:
        """The settings, for ``print(module)``."""
        return f"criterion={self.criterion!r}"


class RunningStatistics(nn.Module):
    """α, β matched to a running average of the statistics, per head; frozen in eval mode.

    In training every batch's statistics (valid tokens only, summed over all processes) enter the
    average; the α, β used come from *before* that, so that a causal model never sees its own
    sequence. The first batch of a bidirectional model is matched to itself. A batch without valid
    tokens, or with NaN or infinity in it, leaves the average as it is.

    Activation checkpointing runs a forward twice. The second run happens inside the backward pass;
    it updates nothing and uses the same α, β as the first.
    """

    query_variance: Tensor
    key_variance: Tensor
    keys: Tensor
    updates: Tensor
    last_used: Tensor
    last_seen: Tensor

    def __init__(
        self,
        num_heads: int,
        criterion: str = "variance",
        *,
        momentum: float = 0.1,
        impl: str = "auto",
        device: torch.device | str | None = None,
    ) -> None:
        """Start from unit variances; `lln.LLNCore` says what the arguments are."""
        super().__init__()
        checks.check_matching(criterion)
        _check_momentum(momentum)
        self.criterion, self.momentum, self.impl = criterion, momentum, impl
        self.register_buffer("query_variance", torch.ones(num_heads, device=device))
        self.register_buffer("key_variance", torch.ones(num_heads, device=device))
        self.register_buffer("keys", torch.full((1,), 1024.0, device=device))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64, device=device))
        for name, size in (("last_used", 2 * num_heads + 1), ("last_seen", 2 * num_heads + 3)):
            self.register_buffer(name, torch.ones(size, device=device), persistent=False)
        self._recent: deque[tuple[Tensor, Tensor]] = deque(maxlen=_REMEMBERED)

    def forward(
        self, query: Tensor, key: Tensor, key_mask: Tensor | None = None, is_causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        """α, β of shape ``[1, H, 1, 1]``."""
        moments = self.moments(query, key, key_mask, is_causal)
        return temperatures(moments, query.shape[-1], self.criterion)

    def moments(
        self, query: Tensor, key: Tensor, key_mask: Tensor | None = None, is_causal: bool = False
    ) -> Moments:
        """The average to use for a call, ``[1, H]`` each; in training the call then enters it."""
        if self.training:
            with torch.no_grad(), without_autocast(query):
                state = self._train(query, key, key_mask, is_causal)
        else:
            state = self._state()
        heads = self.query_variance.shape[0]
        query_variance, key_variance, keys = state.split([heads, heads, 1])
        return Moments(
            query_variance[None],
            key_variance[None],
            keys[None],
            ((query_variance <= 1e-12) | (key_variance <= 1e-12))[None],
        )

    def extra_repr(self) -> str:
        """The settings, for ``print(module)``."""
        return f"criterion={self.criterion!r}, momentum={self.momentum}"

    def __getstate__(self) -> dict[str, object]:
        """Leave out what is only needed by a backward pass that is still running."""
        return {**super().__getstate__(), "_recent": deque(maxlen=self._recent.maxlen)}

    def _state(self) -> Tensor:
        return torch.cat([self.query_variance, self.key_variance, self.keys])

    def _train(
        self, query: Tensor, key: Tensor, key_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Add a batch to the average and return the state to use for it."""
        moments = measured_moments(query, key, key_mask, self.impl)
        sums = _weighted_sums(moments, query, key, key_mask)
        if in_backward():
            return self._state_of_first_run(sums)
        own = sums.clone()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        batch, usable = _averages(sums)
        first = (self.updates == 0) & usable
        before = self._state()
        used = before if is_causal else torch.where(first, batch, before)
        if is_compiling():
            # Both runs of a checkpointed forward share this graph: tell them apart when it runs.
            again = inside_backward(sums)
            known = ~again | (own - self.last_seen).abs().nan_to_num().le(1e-4 * own.abs()).all()
            torch.ops.aten._assert_async.msg(known, _ONE_PENDING)
            usable = usable & ~again
            used = torch.where(again, self.last_used, used)
            self.last_used.copy_(used)
            self.last_seen.copy_(own)
        after = torch.where(first, batch, torch.lerp(before, batch, self.momentum))
        after = torch.where(usable, after, before)
        heads = self.query_variance.shape[0]
        for buffer, part in zip(
            (self.query_variance, self.key_variance, self.keys),
            after.split([heads, heads, 1]),
            strict=True,
        ):
            buffer.copy_(part)
        self.updates += usable.to(torch.int64)
        if not is_compiling():
            self._recent.append((own, used))
        return used

    def _state_of_first_run(self, sums: Tensor) -> Tensor:
        """The state of a checkpointed forward's first run, found by its batch's statistics."""
        # Latest first: if a batch came several times, the rerun belongs to the latest.
        recent = [pair for pair in reversed(self._recent) if pair[0].device == sums.device]
        if not recent:
            return self._state()
        seen, used = (torch.stack(column) for column in zip(*recent, strict=True))
        distance = (seen - sums).abs().sum(-1)
        nearest = distance.nan_to_num(torch.inf).argmin()
        return used.index_select(0, nearest.reshape(1)).squeeze(0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RunningStatistics:
        """Follow the module to another device, but stay float32 when it becomes half or double."""
        for name, buffer in self._buffers.items():
            if buffer is not None:
                moved = fn(buffer)
                same = moved.dtype == buffer.dtype
                self._buffers[name] = moved if same else buffer.to(moved.device)
        return self


class FixedTemperatures(nn.Module):
    """α, β per head as buffers: given once, saved with the model, never changed by training."""

    alpha: Tensor
    beta: Tensor

    def __init__(
        self,
        num_heads: int,
        alpha: float | Tensor,
        beta: float | Tensor,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        """Keep α, β: numbers or tensors of H elements."""
        super().__init__()
        self.register_buffer("alpha", per_head("alpha", alpha, num_heads, device))
        self.register_buffer("beta", per_head("beta", beta, num_heads, device))

    def forward(
        self, query: Tensor, key: Tensor, key_mask: Tensor | None = None, is_causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        """α, β of shape ``[1, H, 1, 1]``."""
        return self.alpha[None, :, None, None], self.beta[None, :, None, None]


class LearnedTemperatures(nn.Module):
    """α, β per head as parameters ``log_alpha``, ``log_beta``, so that they stay positive."""

    def __init__(
        self,
        num_heads: int,
        alpha: float | Tensor,
        beta: float | Tensor,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        """Start at the given α, β: numbers or tensors of H elements."""
        super().__init__()
        self.log_alpha = nn.Parameter(per_head("alpha", alpha, num_heads, device).log())
        self.log_beta = nn.Parameter(per_head("beta", beta, num_heads, device).log())

    def forward(
        self, query: Tensor, key: Tensor, key_mask: Tensor | None = None, is_causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        """α, β of shape ``[1, H, 1, 1]``, with gradients."""
        return self.log_alpha.exp()[None, :, None, None], self.log_beta.exp()[None, :, None, None]


def make_statistics(
    statistics: str,
    num_heads: int,
    head_dim: int,
    *,
    matching: str = "variance",
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    momentum: float = 0.1,
    impl: str = "auto",
    device: torch.device | str | None = None,
) -> nn.Module:
    """Build the source of α, β by its name; `lln.LLNCore` says what the arguments are.

    Without α or β, ``"fixed"`` and ``"learned"`` values are matched to unit variances.
    """
    check_choice("statistics", statistics, STATISTICS)
    checks.check_matching(matching)
    _check_momentum(momentum)
    if statistics in ("sample", "running"):
        if alpha is not None or beta is not None:
            raise InvalidInputError(
                f"alpha and beta go with statistics='fixed' or 'learned', not {statistics!r}."
            )
        if statistics == "sample":
            return SampleStatistics(matching, impl=impl)
        return RunningStatistics(num_heads, matching, momentum=momentum, impl=impl, device=device)
    # A module may be built on the meta device, which has no numbers to read.
    with torch.device("cpu"):
        default = matched_spread(torch.ones(()), head_dim, 1024.0, matching).item()
    kind = FixedTemperatures if statistics == "fixed" else LearnedTemperatures
    return kind(
        num_heads,
        default if alpha is None else alpha,
        default if beta is None else beta,
        device=device,
    )


def _check_momentum(momentum: float) -> None:
    if isinstance(momentum, bool) or not isinstance(momentum, Real) or not 0 < momentum <= 1:
        raise InvalidInputError(f"momentum must be a number in (0, 1], got {shown(momentum)}.")


def per_head(
    name: str,
    value: float | Tensor,
    num_heads: int,
    device: torch.device | str | None,
    *,
    is_positive: bool = True,
) -> Tensor:
    """A number or H values as H values in float32; ``is_positive`` refuses zero and below."""
    try:
        tensor = torch.as_tensor(value, dtype=torch.float32)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"{name} must be a number or have one value per head ({num_heads}), got {shown(value)}."
        ) from error
    tensor = tensor.to(device).detach().flatten()
    if tensor.numel() not in (1, num_heads):
        raise InvalidInputError(
            f"{name} must be a number or have one value per head ({num_heads}), got "
            f"{tensor.numel()} values."
        )
    if not tensor.is_meta:
        fits = tensor.isfinite()
        wrong = tensor[~(fits & (tensor > 0) if is_positive else fits)]
        if wrong.numel():
            wanted = "positive and finite" if is_positive else "finite"
            raise InvalidInputError(f"{name} must be {wanted}, got {wrong[0].item():g}.")
    return tensor.expand(num_heads).clone()


def _weighted_sums(moments: Moments, query: Tensor, key: Tensor, key_mask: Tensor | None) -> Tensor:
    """A batch's statistics as sums that add up over processes: ``[2H + 3]``."""
    masked_queries = key_mask is not None and query.shape[2] == key.shape[2]
    queries = moments.keys if masked_queries else torch.full_like(moments.keys, query.shape[2])
    samples = (moments.keys > 0).to(moments.keys.dtype)
    return torch.cat(
        [
            (moments.query_variance * queries).sum(0),
            # The spread of constant keys is only rounding noise: count it as zero.
            torch.where(moments.degenerate, 0.0, moments.key_variance * moments.keys).sum(0),
            moments.keys.sum(0),
            samples.sum(0),
            queries.sum(0),
        ]
    ).float()


def _averages(sums: Tensor) -> tuple[Tensor, Tensor]:
    """The state ``[2H + 1]`` from the sums, and whether it may enter the average."""
    heads = (sums.shape[0] - 3) // 2
    query_sum, key_sum, keys, samples, queries = sums.split([heads, heads, 1, 1, 1])
    state = torch.cat(
        [
            query_sum / queries.clamp_min(1),
            key_sum / keys.clamp_min(1),
            keys / samples.clamp_min(1),
        ]
    )
    return state, state.isfinite().all() & (keys > 0).all() & (queries > 0).all()


@torch.library.custom_op("lln::inside_backward", mutates_args=())
def inside_backward(like: Tensor) -> Tensor:
    """`in_backward` as a tensor, for compiled graphs, which evaluate it when they run."""
    answer = torch._C._current_graph_task_id() != -1
    return torch.full((), answer, dtype=torch.bool, device=like.device)


@inside_backward.register_fake
def _(like: Tensor) -> Tensor:
    return like.new_empty((), dtype=torch.bool)
