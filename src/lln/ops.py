"""The fused kernels as PyTorch operators: schemas, fakes and gradients.

Registered through ``torch.library``, so that ``torch.compile``, CUDA graphs, activation
checkpointing and ``opcheck`` know them. Triton is imported when an operator first runs, never here.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width,
E value width, SH summary heads (H if β differs within a group of query heads, else Hk).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.kernels.shapes import output_like, summary_heads

# query, key, value, alpha, beta, key_mask, mix | alpha, beta, mix as numbers | block_size, scale,
# dropout_p, seed
_TENSORS = 7


@torch.library.custom_op("lln::attend", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    key_mask: Tensor | None,
    mix: Tensor | None,
    alpha_number: float,
    beta_number: float,
    mix_number: float,
    block_size: int,
    scale: float,
    dropout_p: float,
    seed: int,
) -> Tensor:
    """LLN attention (with the diagonal part if block_size > 0), without what a backward needs."""
    from lln.kernels import launch

    settings = launch.Settings(
        alpha_number, beta_number, mix_number, block_size, scale, dropout_p, seed
    )
    return launch.attend(query, key, value, alpha, beta, key_mask, mix, settings, save=False)[0]


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return output_like(query, value.shape[-1])


@torch.library.custom_op("lln::attend_saving", mutates_args=())
def attend_saving(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    key_mask: Tensor | None,
    mix: Tensor | None,
    alpha_number: float,
    beta_number: float,
    mix_number: float,
    block_size: int,
    scale: float,
    dropout_p: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, with the summary: log-mass ``[B, SH, D]`` and centroid ``[B, SH, D, E]``."""
    from lln.kernels import launch

    settings = launch.Settings(
        alpha_number, beta_number, mix_number, block_size, scale, dropout_p, seed
    )
    return launch.attend(query, key, value, alpha, beta, key_mask, mix, settings, save=True)


@attend_saving.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, alpha: Tensor | None, beta: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    slots = summary_heads(query, key, beta)
    saved = (query.shape[0], slots, query.shape[-1])
    return (
        output_like(query, value.shape[-1]),
        query.new_empty(saved, dtype=torch.float32),
        value.new_empty((*saved, value.shape[-1])),
    )


@torch.library.custom_op("lln::attend_backward", mutates_args=())
def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    key_mask: Tensor | None,
    mix: Tensor | None,
    log_mass: Tensor,
    centroid: Tensor,
    alpha_number: float,
    beta_number: float,
    mix_number: float,
    block_size: int,
    scale: float,
    dropout_p: float,
    seed: int,
    alpha_grad: bool,
    beta_grad: bool,
    mix_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, alpha, beta, mix; the last three empty unless asked for."""
    from lln.kernels import launch

    settings = launch.Settings(
        alpha_number, beta_number, mix_number, block_size, scale, dropout_p, seed
    )
    return launch.attend_backward(
        gradient,
        query,
        key,
        value,
        alpha,
        beta,
        key_mask,
        mix,
        log_mass,
        centroid,
        settings,
        alpha_grad,
        beta_grad,
        mix_grad,
    )


@attend_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    key_mask: Tensor | None,
    mix: Tensor | None,
    log_mass: Tensor,
    centroid: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    empty = query.new_empty((0,), dtype=torch.float32)
    asked = zip((alpha, beta, mix), rest[-3:], strict=True)
    extra = [
        torch.empty_like(side) if wanted and side is not None else empty.clone()
        for side, wanted in asked
    ]
    shared = log_mass.shape[1] == key.shape[1]
    dk, dv = (torch.empty_like(t) if shared else t.new_empty(t.shape) for t in (key, value))
    return torch.empty_like(query), dk, dv, extra[0], extra[1], extra[2]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS], *output[1:])
    ctx.numbers = inputs[_TENSORS:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if gradient is None:
        return (None,) * (_TENSORS + 7)
    needs = ctx.needs_input_grad
    grads = attend_backward(
        gradient, *ctx.saved_tensors, *ctx.numbers, needs[3], needs[4], needs[6]
    )
    alpha, beta, mix = (
        grad if needed else None
        for grad, needed in zip(grads[3:], (needs[3], needs[4], needs[6]), strict=True)
    )
    return (*grads[:3], alpha, beta, None, mix, *(None,) * 7)


attend_saving.register_autograd(_backward, setup_context=_save)


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: float | Tensor,
    beta: float | Tensor,
    key_mask: Tensor | None,
    mix: float | Tensor = 1.0,
    block_size: int = 0,
    scale: float = 1.0,
    dropout_p: float = 0.0,
) -> Tensor:
    """LLN attention by the kernels: ``[B, H, T, E]`` in the dtype of query.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, S, D]``.
        value: ``[B, Hk, S, E]``.
        alpha: A number or a tensor that broadcasts to ``[B, H, 1, 1]``.
        beta: Likewise, or to ``[B, Hk, 1, 1]``.
        key_mask: bool ``[B, S]``.
        mix: A number or a tensor that broadcasts to ``[B, H, T, E]``.
        block_size: Of the diagonal part; 0 = none.
        scale: Of the diagonal part's scores.
        dropout_p: Probability to drop a key.
    """
    tensors = [_as_4d(side) for side in (alpha, beta, mix)]
    alpha_t, beta_t, mix_t = tensors
    alpha_n, beta_n, mix_n = (
        1.0 if isinstance(side, Tensor) else float(side) for side in (alpha, beta, mix)
    )
    if beta_t is not None and beta_t.shape[1] == 1:
        # One value for all heads: the query heads of a group can share a summary.
        beta_t = beta_t.expand(-1, key.shape[1], 1, 1)
    if alpha_t is not None and alpha_t.shape[1] == 1:
        alpha_t = alpha_t.expand(-1, query.shape[1], 1, 1)
    seed = int(torch.randint(0, 2**31 - 1, ()).item()) if dropout_p > 0 else 0
    numbers = (alpha_n, beta_n, mix_n, block_size, scale, dropout_p, seed)
    everything = (query, key, value, alpha_t, beta_t, key_mask, mix_t)
    if torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in everything
    ):
        return attend_saving(*everything, *numbers)[0]
    return attend(*everything, *numbers)


def _as_4d(side: float | Tensor) -> Tensor | None:
    if not isinstance(side, Tensor):
        return None
    return side.reshape((1,) * (4 - side.dim()) + tuple(side.shape))
