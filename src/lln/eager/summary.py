"""The summary: all keys and values in D slots, one per feature; two summaries merge exactly.

LLN attention, Eq. (8)-(9), is exactly two softmaxes around this summary (docs/method.md):

    L_f = logsumexp_j(β k_jf)                  log-mass of slot f
    C_f = Σ_j softmax_j(β k_jf) · v_j          centroid of slot f
    out_i = Σ_f softmax_f(α q_if + L_f) · C_f

There is no epsilon, nothing overflows, the weights of a row sum to 1, and the output stays inside
the convex hull of the values.

Dimension legend: B batch, H heads, T queries, S keys, D head width (= slots), E value width;
``...`` any leading dimensions that broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lln import checks
from lln.checks.names import shown
from lln.checks.printing import brief
from lln.checks.tensors import check_recorder, check_tensor
from lln.eager.infinity import as_nan
from lln.eager.products import multiply
from lln.errors import InvalidInputError
from lln.precision import accumulation_dtype, without_autocast
from lln.tracing import is_untraced_on_cpu, values_are_readable

# Stands for log 0. Finite, because −inf − (−inf) is NaN in the gradient of a fully masked head.
LOG_ZERO = -1e30


def key_exponents(
    key: Tensor, value: Tensor, beta: float | Tensor, token_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Exponents β·k and values, with masked tokens set to ``LOG_ZERO`` and zero.

    ``where`` instead of multiplication, because a NaN under the mask would give 0 · NaN. The keys
    are cleared before the product too, because the gradient of β is multiplied by them.

    Args:
        key: ``[..., S, D]``.
        value: ``[..., S, E]``.
        beta: Broadcasts to ``[..., 1, 1]``.
        token_mask: bool, broadcasts to ``[..., S]``; None = all valid.
    """
    if token_mask is None:
        return key * beta, value
    keep = token_mask.unsqueeze(-1)
    exponent = torch.where(keep, key, 0.0) * beta
    return torch.where(keep, exponent, LOG_ZERO), torch.where(keep, value, 0.0)


def summarise(exponent: Tensor, value: Tensor, *, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """Log-masses L ``[..., D]`` and centroids C ``[..., D, E]`` of keys and values.

    Args:
        exponent: β·k, ``[..., S, D]``.
        value: ``[..., S, E]``.
        overwrite: Whether nobody else needs the exponents, so that their memory is used again.
    """
    if exponent.shape[-2] == 0:
        log_mass = exponent.new_full((*exponent.shape[:-2], exponent.shape[-1]), LOG_ZERO)
        return log_mass, exponent.mT @ value
    peak = exponent.detach().amax(-2, keepdim=True)
    # In place, because allocating a new tensor costs more than computing its entries.
    weight = (exponent.sub_(peak) if overwrite else exponent - peak).exp_()
    mass = weight.sum(-2, keepdim=True)
    centroid = _product(weight.mT, value) / mass.mT
    return (peak + mass.log()).squeeze(-2), centroid


def read(
    exponent: Tensor, log_mass: Tensor, centroid: Tensor, *, overwrite: bool = False
) -> Tensor:
    """Every query's softmax over the slots, applied to the centroids: ``[..., T, E]``.

    Args:
        exponent: α·q, ``[..., T, D]``.
        log_mass: ``[..., D]``.
        centroid: ``[..., D, E]``.
        overwrite: Whether nobody else needs the exponents, so that their memory is used again.
    """
    row = log_mass.unsqueeze(-2)
    weight = (exponent.add_(row) if overwrite else exponent + row).softmax(-1)
    return _product(weight, centroid)


def _product(left: Tensor, right: Tensor) -> Tensor:
    # Grouped heads broadcast, which the faster gradients do not know.
    return multiply(left, right) if left.shape[:-2] == right.shape[:-2] else left @ right


def merge(
    log_mass: Tensor, centroid: Tensor, other_log_mass: Tensor, other_centroid: Tensor
) -> tuple[Tensor, Tensor]:
    """The summary of two sets of keys from their summaries; associative, exact."""
    merged = torch.logaddexp(log_mass, other_log_mass)
    # Weights w and 1 − w instead of two exponentials exp(L − merged): rounding of L makes their sum
    # differ from 1, which adds up over thousands of decoded tokens.
    weight = torch.sigmoid(other_log_mass - log_mass).unsqueeze(-1)
    return merged, centroid + weight * (other_centroid - centroid)


def summarise_heads(
    key: Tensor, value: Tensor, beta: float | Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Log-mass ``[B, H, D]`` and centroid ``[B, H, D, E]`` of checked inputs ``[B, H, S, …]``.

    H is the number of key heads, or of β's heads if larger (grouped queries, each with its own β).
    """
    dtype = accumulation_dtype(key.dtype)
    key, value = key.to(dtype), value.to(dtype)
    heads, beta_heads = key.shape[1], heads_of(beta)
    scale = beta.to(dtype) if isinstance(beta, Tensor) else beta
    token_mask = None if key_mask is None else key_mask[:, None, :]
    grouped = beta_heads > heads
    if grouped and isinstance(scale, Tensor):
        scale = group_heads(scale.reshape(-1, beta_heads, 1, 1), heads)
        key, value = key.unsqueeze(2), value.unsqueeze(2)
        token_mask = None if token_mask is None else token_mask.unsqueeze(1)
    exponent, value = key_exponents(key, value, scale, token_mask)
    log_mass, centroid = summarise(exponent, value, overwrite=is_untraced_on_cpu(exponent))
    if grouped:
        return log_mass.flatten(1, 2), centroid.flatten(1, 2)
    return log_mass, centroid


def read_heads(query: Tensor, alpha: float | Tensor, log_mass: Tensor, centroid: Tensor) -> Tensor:
    """Checked queries ``[B, H, T, D]`` read summaries with H heads or a divisor of H."""
    dtype, slots = log_mass.dtype, log_mass.shape[1]
    scale = alpha.to(dtype) if isinstance(alpha, Tensor) else alpha
    rows, grouped = query.to(dtype), query.shape[1] != slots
    if grouped:
        if isinstance(scale, Tensor) and scale.dim() > 2:
            scale = group_heads(scale.reshape(-1, scale.shape[-3], 1, 1), slots)
        rows = group_heads(rows, slots)
        log_mass, centroid = log_mass.unsqueeze(2), centroid.unsqueeze(2)
    exponent = rows * scale
    out = read(exponent, log_mass, centroid, overwrite=is_untraced_on_cpu(exponent))
    return (out.flatten(1, 2) if grouped else out).to(query.dtype)


def heads_of(scale: float | Tensor) -> int:
    """How many heads α or β has values for."""
    return scale.shape[-3] if isinstance(scale, Tensor) and scale.dim() > 2 else 1


def group_heads(tensor: Tensor, groups: int) -> Tensor:
    """View ``[B, H, ...]`` as ``[B, groups, H / groups, ...]``; a single head broadcasts."""
    if tensor.shape[1] == 1:
        return tensor.unsqueeze(2)
    return tensor.unflatten(1, (groups, tensor.shape[1] // groups))


@dataclass
class KeySummary:
    """Keys and values of any length, as ``D`` slots that every query can read.

    One object serves bidirectional attention (one summary), cross attention (summarise once, read
    often), streaming and decoding (``append``), chunked and parallel use (``merge``).

    Attributes:
        log_mass: ``[B, H, D]``, L of every slot; ``LOG_ZERO`` while no key has been seen.
        centroid: ``[B, H, D, E]``, C of every slot.
        beta: What the keys were multiplied by: a number or a tensor ``[B or 1, H or 1, 1, 1]``.

    Example:
        >>> key, value = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4)
        >>> whole = KeySummary.of(key, value, beta=2.0)
        >>> first = KeySummary.of(key[:, :, :2], value[:, :, :2], beta=2.0)
        >>> first = first.append(key[:, :, 2:], value[:, :, 2:])
        >>> query = torch.randn(1, 2, 3, 4)
        >>> torch.allclose(whole.read(query, alpha=2.0), first.read(query, alpha=2.0), atol=1e-6)
        True
    """

    log_mass: Tensor
    centroid: Tensor
    beta: float | Tensor

    def __repr__(self) -> str:
        """Tensors are shown by their shapes."""
        return brief(self, vars(self))

    @classmethod
    def of(
        cls, key: Tensor, value: Tensor, beta: float | Tensor, key_mask: Tensor | None = None
    ) -> KeySummary:
        """Summarise keys and values.

        Args:
            key: ``[B, H, S, D]``.
            value: ``[B, H, S, E]``.
            beta: A positive number, or a tensor that broadcasts to ``[B, H, 1, 1]``. With a
                multiple of H heads (one β per grouped query head) the summary has that many heads.
            key_mask: bool ``[B, S]``, True = attend.

        Returns:
            The summary, in float32 (float64 for float64 inputs).
        """
        checks.check_qkv(key, key, value, layout="dense")
        checks.check_key_mask(key_mask, key)
        batch, heads = key.shape[:2]
        grouped = heads_of(beta) > heads > 0 and heads_of(beta) % heads == 0
        allowed = (heads, heads_of(beta)) if grouped else (heads,)
        checks.check_temperature("beta", beta, batch, allowed, key.device)
        with without_autocast(key):
            return cls(*summarise_heads(as_nan(key), value, beta, key_mask), beta)

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        head_width: int,
        value_width: int,
        beta: float | Tensor,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> KeySummary:
        """A summary without keys, to ``append`` to; reading it gives zeros."""
        for name, size, least in (
            ("batch", batch, 0),
            ("heads", heads, 0),
            ("head_width", head_width, 1),
            ("value_width", value_width, 0),
        ):
            checks.check_count(name, size, least)
        if dtype not in checks.FLOAT_DTYPES:
            given = dtype if isinstance(dtype, torch.dtype) else shown(dtype)
            raise checks.wrong_dtype("dtype", given)
        log_mass = torch.full((batch, heads, head_width), LOG_ZERO, dtype=dtype, device=device)
        checks.check_temperature("beta", beta, batch, (heads,), log_mass.device)
        centroid = torch.zeros(batch, heads, head_width, value_width, dtype=dtype, device=device)
        return cls(log_mass, centroid, beta)

    def merge(self, other: KeySummary) -> KeySummary:
        """The summary of both sets of keys; neither operand changes.

        Raises:
            InvalidInputError: If the shapes differ, or both β are numbers and differ.
        """
        if not isinstance(other, KeySummary):
            raise InvalidInputError(
                f"a summary can be merged with another KeySummary, got {type(other).__name__}."
            )
        if self.log_mass.device != other.log_mass.device:
            raise InvalidInputError(
                f"summaries to merge must be on one device, got {self.log_mass.device} and "
                f"{other.log_mass.device}."
            )
        if self.log_mass.shape != other.log_mass.shape or (
            self.centroid.shape != other.centroid.shape
        ):
            raise InvalidInputError(
                f"summaries to merge must have the same shape, got centroids "
                f"{checks.shape_of(self.centroid)} and {checks.shape_of(other.centroid)}."
            )
        if not _same_beta(self.beta, other.beta):
            raise InvalidInputError(
                "summaries to merge must have been made with the same beta, got two that differ."
            )
        merged = merge(self.log_mass, self.centroid, other.log_mass, other.centroid)
        return KeySummary(*merged, self.beta)

    def append(self, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> KeySummary:
        """Add tokens to this summary, in place like ``list.append``, and return it.

        One token costs O(D·E) whatever came before. The tensors held so far are replaced, not
        modified, so that gradients through earlier reads stay valid.

        Args:
            key: ``[B, H, n, D]``, the new keys.
            value: ``[B, H, n, E]``.
            key_mask: bool ``[B, n]``, True = attend.
        """
        extended = self.merge(KeySummary.of(key, value, self.beta, key_mask))
        self.log_mass, self.centroid = extended.log_mass, extended.centroid
        return self

    def read(self, query: Tensor, alpha: float | Tensor) -> Tensor:
        """LLN attention, Eq. (8), of every query over the keys summarised so far.

        Args:
            query: ``[B, H, T, D]``; H may be a multiple of the summary's heads (GQA).
            alpha: A positive number, or a tensor that broadcasts to ``[B, H, 1, 1]``.

        Returns:
            ``[B, H, T, E]`` in the dtype of query.
        """
        _check_query(query, self.log_mass)
        batch, heads = query.shape[:2]
        checks.check_temperature("alpha", alpha, batch, (heads,), query.device)
        with without_autocast(query):
            return read_heads(as_nan(query), alpha, self.log_mass, self.centroid)


def _same_beta(beta: float | Tensor, other: float | Tensor) -> bool:
    if beta is other:
        return True
    if isinstance(beta, Tensor) or isinstance(other, Tensor):
        both = [torch.as_tensor(side) for side in (beta, other)]
        if not all(values_are_readable(side) for side in both):
            return True
        return bool(torch.eq(*both).all())
    return beta == other


def _check_query(query: Tensor, log_mass: Tensor) -> None:
    check_recorder()
    check_tensor("query", query)
    batch, heads, width = log_mass.shape
    if query.dim() != 4 or query.shape[0] != batch or query.shape[-1] != width:
        raise InvalidInputError(
            f"query must be [B, H, T, D] = [{batch}, {heads}, T, {width}] to read this summary, "
            f"got shape {checks.shape_of(query)}."
        )
    if query.dtype not in checks.FLOAT_DTYPES:
        raise InvalidInputError(f"query must be floating point, got {query.dtype}.")
    if heads != query.shape[1] and (heads == 0 or query.shape[1] % heads):
        raise InvalidInputError(
            f"query must have {heads} heads or a multiple of it, got {query.shape[1]}."
        )
    if query.device != log_mass.device:
        raise checks.wrong_device("query", query, log_mass.device, "the summary")
