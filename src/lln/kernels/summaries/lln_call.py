"""The arguments of a call, in the form that the kernels need.

Dimension legend: see `lln.kernels.lln.launch_bidirectional`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.kernels.launching.kernel_arguments import (
    flat_beta,
    flat_scale,
    mask_bytes,
    precision_of,
    strides_of,
)
from lln.kernels.launching.recipes import Recipe, launch_cached
from lln.kernels.launching.shapes import layout_of, summary_heads
from lln.kernels.launching.sizes import Sizes, choose_sizes

# Gradients of query, key, value, and of alpha, beta and mix where they are needed.
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


class LLNCall(NamedTuple):
    """One call: its tensors and options.

    Attributes:
        query: ``[B, H, T, D]``; packed sequences come as one sample.
        key: ``[B, Hk, S, D]``.
        value: ``[B, Hk, S, E]``.
        alpha: 4-D, broadcasts to ``[B, H, 1, 1]``; None = ``alpha_number``.
        beta: 4-D; None = ``beta_number``.
        mask: bool ``[B, S]`` or None.
        mix: 4-D, broadcasts to ``[B, H, T, E]``; None = ``mix_number``.
        bounds: Integers ``[n + 1]`` of packed sequences or None.
        alpha_number: α where it is one number.
        beta_number: β where it is one number.
        mix_number: The weight of the LLN part where it is one number.
        block_size: Tokens in a block of the diagonal part; 0 = no diagonal part.
        scale: Factor of the diagonal part's scores.
        dropout_p: Probability to drop a key.
        seed: Random seed that decides which keys are dropped.
        causal: Whether a row sees only the keys up to itself.
        longest: Length of the longest packed sequence (or more); 0 = not packed.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    alpha: Tensor | None = None
    beta: Tensor | None = None
    mask: Tensor | None = None
    mix: Tensor | None = None
    bounds: Tensor | None = None
    alpha_number: float = 1.0
    beta_number: float = 1.0
    mix_number: float = 1.0
    block_size: int = 0
    scale: float = 1.0
    dropout_p: float = 0.0
    seed: int = 0
    causal: bool = False
    longest: int = 0

    @property
    def samples(self) -> int:
        """B, or the number of packed sequences."""
        return self.query.shape[0] if self.bounds is None else self.bounds.shape[0] - 1

    @property
    def summary_heads(self) -> int:
        """SH: the number of key heads, or of query heads if β differs within a group."""
        return summary_heads(self.query, self.key, self.beta)

    @property
    def is_shifted(self) -> bool:
        """Whether the first block may begin before token 0: a mask decides where blocks begin."""
        return self.mask is not None and self.block_size > 0

    def reach(self, tokens: int) -> int:
        """How many places the blocks of ``tokens`` tokens cover at most."""
        return tokens + self.block_size - 1 if self.is_shifted else tokens

    def family(self, name: str) -> Hashable:
        """What decides whether sizes fit the chip; calls of one family share smaller sizes."""
        query, width = self.query, self.value.shape[3]
        return name, query.device, query.dtype, query.shape[3], width, self.block_size

    def sizes(self, summaries: int) -> Sizes:
        """The sizes of this call with ``summaries`` summaries per sample."""
        tensors = (self.query, self.key, self.value)
        cut = (self.samples, summaries, self.block_size, self.longest)
        return choose_sizes(*tensors, *cut, causal=self.causal)

    def layout_key(self, *others: Tensor | None) -> Hashable:
        """Shapes, strides, types and alignment of all tensors, which the launches depend on."""
        given = (self.query, self.key, self.value, self.alpha, self.beta, self.mask, self.mix)
        return tuple([layout_of(tensor) for tensor in (*given, self.bounds, *others)])

    def no_gradients(self) -> Gradients:
        """Zeros of the shape of every gradient."""
        tensors = (self.query, self.key, self.value, self.alpha, self.beta, self.mix)
        zeros = [None if side is None else torch.zeros_like(side) for side in tensors]
        return zeros[0], zeros[1], zeros[2], zeros[3], zeros[4], zeros[5]  # pyright: ignore


def runtime_args(call: LLNCall, like: Tensor, summaries: int) -> dict[str, Any]:
    """The arguments that differ from call to call, by their names in the kernels.

    Every one of the ``summaries`` of a sample (fixed-size states of keys and values) has its β.
    Where the mix is a number the pointer of ``like`` ``[B, H, T, E]`` is passed.
    """
    query, samples = call.query, call.samples
    return {
        "p_q": query,
        "p_k": call.key,
        "p_v": call.value,
        "p_alpha": flat_scale(call.alpha, samples, query),
        "p_beta": flat_beta(call.beta, summaries, samples, query),
        "p_mask": mask_bytes(call.mask, query),
        "p_m": like if call.mix is None else call.mix.expand(like.shape),
        "p_starts": query if call.bounds is None else call.bounds,
        "alpha": call.alpha_number,
        "beta": call.beta_number,
        "mix": call.mix_number,
        "seed": call.seed,
    }


def kind_of(
    name: str, call: LLNCall, *flags: Hashable, others: tuple[Tensor | None, ...] = ()
) -> Hashable:
    """What decides the launches of a pass; see `launch_call`."""
    options = (call.query.device, call.block_size, call.scale, call.dropout_p, call.longest)
    return name, *flags, call.layout_key(*others), options


def forward_kind(call: LLNCall, save: bool) -> Hashable:
    """What decides the launches of a forward pass into a new tensor; a causal one saves nothing."""
    if call.causal:
        return kind_of("causal", call, others=(None,))
    return kind_of("attend", call, save, others=(None,))


def backward_kind(call: LLNCall, gradient: Tensor) -> Hashable:
    """What decides the launches of a backward pass into new tensors, without α, β and mix."""
    name = "causal backward" if call.causal else "backward"
    return kind_of(name, call, False, False, 0, others=(gradient, None))


def launch_call(
    name: str,
    call: LLNCall,
    runtime: dict[str, Any],
    summaries: int,
    write: Callable[..., Recipe],
    *flags: Hashable,
    others: tuple[Tensor | None, ...] = (),
) -> None:
    """Run the recipe of a pass; write it first if this kind of call is new.

    ``write`` makes it from the call, ``runtime`` (see `runtime_args`), sizes and ``flags``, which
    decide the launches, too, as do the layouts of ``others``. There are so many summaries per
    sample.
    """
    launch_cached(
        kind_of(name, call, *flags, others=others),
        call.family(name),
        runtime,
        call.query.device,
        lambda: call.sizes(summaries),
        lambda chosen: write(call, runtime, chosen, *flags),
    )


_WITH_STRIDES = ("p_q", "p_k", "p_v", "p_o", "p_g", "p_m", "p_dq", "p_dk", "p_dv")


def constant_args(
    call: LLNCall, chosen: Sizes, runtime: dict[str, Any], summaries: int, widest: int = 0
) -> dict[str, Any]:
    """The arguments that calls of one kind share, by their names in the kernels.

    Strides of all tensors in ``runtime`` are among them. There are so many summaries per sample;
    for ``widest`` see `precision_of`.
    """
    (heads, tokens, width), keys = call.query.shape[1:], call.key.shape[2]
    tensors = {name: runtime[name] for name in _WITH_STRIDES if name in runtime}
    strides = strides_of(call.bounds is not None, **tensors)
    if call.mix is None:
        strides |= dict.fromkeys(("stride_mb", "stride_mh", "stride_mt", "stride_md"), 0)
    return {
        "T": tokens,
        "S": keys,
        "H": heads,
        "SH": summaries,
        "R": heads // summaries,
        "KG": summaries // call.key.shape[1],
        "D": width,
        "E": call.value.shape[3],
        "BD": chosen.width,
        "BE": chosen.value_width,
        "scale": call.scale,
        "block_size": max(call.block_size, 1),
        "dropout_p": call.dropout_p,
        "HAS_ALPHA": call.alpha is not None,
        "HAS_BETA": call.beta is not None,
        "HAS_MASK": call.mask is not None,
        "HAS_DROPOUT": call.dropout_p > 0,
        "QUIET": call.mask is not None and tokens == keys,
        "MIX": mix_kind(call.mix, call.block_size),
        "PACKED": call.bounds is not None,
        "SHIFTED": call.is_shifted,
        "PRECISION": precision_of(call.query, widest),
        **strides,
    }


def mix_kind(mix: Tensor | None, block_size: int) -> int:
    """The form of mix: 0 no diagonal part, 1 a number, 2 per row, 3 per row and channel."""
    if not block_size:
        return 0
    if mix is None:
        return 1
    return 2 if mix.shape[3] == 1 else 3


def mix_mode(mix: Tensor, shared: int) -> int:
    """How dmix is written: 1 per token, 2 per token and channel, 3 per channel."""
    if mix.shape[3] == 1:
        return 1
    return 3 if mix.shape[2] == 1 and shared == 1 else 2
