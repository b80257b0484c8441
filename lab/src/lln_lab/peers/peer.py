"""The two shapes of a peer: `Peer` takes token vectors, `Core` takes heads.

Dimension legend: B batch, H heads, N tokens, D head width.
"""

from abc import ABC, abstractmethod
from typing import TypeAlias

import torch
from torch import Tensor, nn

from lln.checks import FLOAT_DTYPES, shape_of
from lln.checks.tensors import check_tensor
from lln.errors import InvalidInputError
from lln.precision import accumulation_dtype, autocast_enabled, without_autocast
from lln_lab.peers.card import Card
from lln_lab.peers.host import Host

# Which tokens are real: bool ``[B, N]``, True = a real token; None = all of them.
Mask: TypeAlias = Tensor | None


class _System(nn.Module, ABC):
    """A module that knows its card, and its host: sizes and place of the layer."""

    card: Card

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.host = host


class Peer(_System):
    """Token vectors in, token vectors out: what `lln_lab.peers.build` returns.

    A subclass writes `mix`. The rules common to all live here: padded tokens are zeroed on entry,
    so that nothing they hold can matter, and zero on return.
    """

    def forward(self, x: Tensor, key_mask: Mask = None) -> Tensor:
        """Mix the tokens.

        Args:
            x: ``[B, N, embed_dim]``.
            key_mask: bool ``[B, N]``, True = a real token.

        Returns:
            ``[B, N, embed_dim]``; padded tokens are zero, and so is a sequence without a real one.
        """
        self._check(x, key_mask)
        return zero_padding(self.mix(zero_padding(x, key_mask), key_mask), key_mask)

    @abstractmethod
    def mix(self, x: Tensor, key_mask: Mask) -> Tensor:
        """The system itself; padded tokens of x are zero, what is returned for them is dropped."""

    def _check(self, x: Tensor, key_mask: Mask) -> None:
        host = self.host
        check_vectors("x", x, host.embed_dim)
        check_dtype(x, self, self.card.name)
        if x.shape[1] < 1:
            raise InvalidInputError("x must hold at least one token.")
        if self.card.needs_max_len and x.shape[1] > host.max_len:
            raise InvalidInputError(
                f"{self.card.name} was built for max_len={host.max_len} tokens and got "
                f"{x.shape[1]}; build it with a larger max_len."
            )
        if key_mask is not None:
            check_key_mask(x, key_mask)


class Core(_System):
    """Heads in, heads out: a drop-in for softmax attention.

    `matrix` is the N×N form written straight from the equation; ``core(q, k, v)`` must equal
    ``matrix(q, k) @ v`` and is tested against it.
    """

    @abstractmethod
    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask = None) -> Tensor:
        """Attend as efficiently as its authors do.

        Args:
            query: ``[B, H, N, D]``.
            key: Like query.
            value: Like query.
            key_mask: bool ``[B, N]``, True = a real token. Masked tokens may hold any finite
                number and have no effect; what is returned for them is unspecified but finite.

        Returns:
            ``[B, H, N, D]`` in the dtype of value; zeros where no key is real.
        """

    @abstractmethod
    def matrix(self, query: Tensor, key: Tensor, key_mask: Mask = None) -> Tensor:
        """The attention matrix ``[B, H, N, N]``, dense, in the accumulation dtype."""


class WideCore(Core):
    """A core that computes in the accumulation dtype: a subclass writes `attend`."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask = None) -> Tensor:
        with without_autocast(query):
            wide = accumulation_dtype(query.dtype)
            out = self.attend(query.to(wide), key.to(wide), value.to(wide), key_mask)
        return out.to(value.dtype)

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask) -> Tensor:
        """`Core.forward` with all tensors, the result included, in the accumulation dtype."""


def check_vectors(name: str, x: Tensor, width: int | None = None) -> None:
    """Refuse anything but floating-point token vectors ``[B, N, W]``, of this width if given."""
    fits = isinstance(x, Tensor) and x.dim() == 3 and width in (None, x.shape[-1])
    if not fits:
        seen = shape_of(x) if isinstance(x, Tensor) else type(x).__name__
        last = "width" if width is None else width
        raise InvalidInputError(f"{name} must be a tensor [batch, tokens, {last}], got {seen}.")
    check_tensor(name, x)
    if x.dtype not in FLOAT_DTYPES:
        raise InvalidInputError(f"{name} must be floating point, got {x.dtype}.")


def check_dtype(x: Tensor, module: nn.Module, name: str) -> None:
    """Refuse tokens that torch would refuse to multiply with the weights of a module."""
    held = {weight.dtype for weight in module.parameters() if weight.dtype in FLOAT_DTYPES}
    if not held or x.dtype in held:
        return
    # Autocast brings all but float64 to one dtype.
    if autocast_enabled(x.device.type) and torch.float64 not in (x.dtype, *held):
        return
    weights = min(held, key=str)
    raise InvalidInputError(
        f"x is {x.dtype} and the weights of {name} are {weights}; "
        f"send x.to({weights}) or cast the module with .to({x.dtype})."
    )


def check_key_mask(x: Tensor, key_mask: Tensor) -> None:
    """Refuse anything but bool ``[B, N]`` on the device of the tokens ``[B, N, …]``."""
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        seen = key_mask.dtype if isinstance(key_mask, Tensor) else type(key_mask).__name__
        raise InvalidInputError(f"key_mask must be bool, True = a real token, got {seen}.")
    if key_mask.shape != x.shape[:2]:
        expected = f"[{x.shape[0]}, {x.shape[1]}]"
        raise InvalidInputError(f"key_mask must have shape {expected}, got {shape_of(key_mask)}.")
    if key_mask.device != x.device:
        raise InvalidInputError(
            f"key_mask must be on the device of x, {x.device}, got {key_mask.device}."
        )


def real_tokens(tokens: Tensor, key_mask: Mask) -> Tensor:
    """The mask of ``[B, …, N, D]`` as a tensor ``[B, N]``, all True where there is none."""
    if key_mask is not None:
        return key_mask
    return tokens.new_ones(tokens.shape[0], tokens.shape[-2], dtype=torch.bool)


def visible(
    tokens: Tensor, key_mask: Mask, is_causal: bool = False, among: Tensor | None = None
) -> Tensor | None:
    """bool, broadcasts to ``[B, H, N, N]``: which key each query may see; None = every one.

    Args:
        tokens: ``[B, H, N, D]``, for its length and device.
        key_mask: bool ``[B, N]``.
        is_causal: Whether later keys are hidden.
        among: What a pattern lets a query see, broadcasts likewise.
    """
    allowed = among
    if key_mask is not None:
        real = key_mask[:, None, None, :]
        allowed = real if allowed is None else allowed & real
    if is_causal:
        earlier = tokens.new_ones(tokens.shape[-2], tokens.shape[-2], dtype=torch.bool).tril()
        allowed = earlier[None, None] if allowed is None else allowed & earlier
    return allowed


def zero_padding(tokens: Tensor, key_mask: Mask) -> Tensor:
    """Tokens ``[B, N, ·]``, or heads ``[B, H, N, ·]``, with zeros for padded ones."""
    if key_mask is None:
        return tokens
    real = key_mask.unsqueeze(-1) if tokens.dim() == 3 else key_mask[:, None, :, None]
    return torch.where(real, tokens, 0.0)
