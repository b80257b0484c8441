"""Hedgehog: exponential features with learned matrices, and the loss that teaches them."""

from typing import Literal

import torch
from torch import Tensor, nn

from lln.checks.names import check_choice
from lln.errors import InvalidInputError
from lln_lab.peers.linear import LinearCore
from lln_lab.peers.peer import Card, Host, Mask

_FORMS = ("softmax", "exp")


class Hedgehog(LinearCore):
    """Linear attention with φ(x) = [softmax(Wx) ; softmax(−Wx)], W per head, one for q, one for k.

    Args:
        form: ``"softmax"`` over the feature axis, or ``"exp"``: φ(x) = [e^{Wx} ; e^{−Wx}].
            The largest exponent over all keys is subtracted, which cancels. A causal row may not
            look at all keys, so causal layers take ``"softmax"``.
        compat: ``"fla"`` for one softmax of [2Wx ; −2Wx], as flash-linear-attention has it.
    """

    card = Card(
        name="hedgehog",
        title="Hedgehog",
        citation="Zhang et al. 2024, arXiv 2402.04347",
        equation="P_ij ∝ φ(q_i)·φ(k_j), φ(x) = [softmax(Wx) ; softmax(−Wx)], or e^{±Wx}",
        complexity="O(N d²)",
        equivariant=True,
        adds="2 H d² (W, started at the identity)",
        oracle="dense form; compat='fla' against its formula",
        departures="no bias beside W; compat='fla' is the joint softmax of [2Wx ; −2Wx]",
    )

    def __init__(
        self,
        host: Host,
        *,
        form: Literal["softmax", "exp"] = "softmax",
        compat: Literal["fla"] | None = None,
    ) -> None:
        super().__init__(host)
        check_choice("form", form, _FORMS)
        check_choice("compat", compat, (None, "fla"))
        if form == "exp" and compat == "fla":
            raise InvalidInputError("compat='fla' is a softmax; leave form='softmax'.")
        if form == "exp" and host.is_causal:
            raise InvalidInputError(
                "form='exp' is scaled by all keys of the sequence; use form='softmax' where "
                "is_causal=True."
            )
        self.form, self.compat = form, compat
        self.query_map, self.key_map = (
            nn.Parameter(torch.eye(host.head_dim).repeat(host.num_heads, 1, 1)) for _ in range(2)
        )

    def features(self, query: Tensor, key: Tensor, key_mask: Mask) -> tuple[Tensor, Tensor]:
        mapped_q = query @ self.query_map.to(query.dtype).mT
        mapped_k = key @ self.key_map.to(key.dtype).mT
        if self.compat == "fla":
            return _both_signs(2 * mapped_q).softmax(-1), _both_signs(2 * mapped_k).softmax(-1)
        if self.form == "softmax":
            return _softmax_halves(mapped_q), _softmax_halves(mapped_k)
        exponents_q, exponents_k = _both_signs(mapped_q), _both_signs(mapped_k)
        if key_mask is not None:
            exponents_k = exponents_k.masked_fill(~key_mask[:, None, :, None], -torch.inf)
        # The largest over the keys, channel by channel, moves from the keys to the queries: every
        # row then has a channel in which a query and a key are both 1.
        top = exponents_k.detach().amax(-2, keepdim=True)
        top = top.masked_fill(top == -torch.inf, 0.0)
        exponents_q = exponents_q + top
        top_q = exponents_q.detach().amax(-1, keepdim=True)
        return (exponents_q - top_q).exp(), (exponents_k - top).exp()


def distillation_loss(student: Tensor, teacher: Tensor, key_mask: Mask = None) -> Tensor:
    """Cross-entropy −Σ_j P_ij log P̂_ij of a teacher's rows P and a student's P̂.

    The mean over all heads and real rows. Teaching maps needs the N×N matrices; using them later
    does not.

    Args:
        student: ``[B, H, N, N]``, as `Core.matrix` returns it, with gradients.
        teacher: Likewise, of the softmax attention to be imitated (``peers.build("softmax", …)``
            on the same q, k); taken as given, without gradients.
        key_mask: bool ``[B, N]``, True = a real token.

    Returns:
        One number; at best the mean entropy of the teacher's rows, in nats.
    """
    if student.shape != teacher.shape:
        raise InvalidInputError(
            f"student and teacher must have the same shape, got {tuple(student.shape)} and "
            f"{tuple(teacher.shape)}."
        )
    # Keys without weight in the teacher cost nothing, whatever the student gives them.
    least = torch.finfo(student.dtype).tiny
    loss = -(teacher.detach() * student.clamp_min(least).log()).sum(-1)
    if key_mask is None:
        return loss.mean()
    rows = key_mask[:, None, :].expand_as(loss)
    return torch.where(rows, loss, 0.0).sum() / rows.sum().clamp_min(1)


def _both_signs(x: Tensor) -> Tensor:
    return torch.cat((x, -x), dim=-1)


def _softmax_halves(x: Tensor) -> Tensor:
    return torch.cat((x.softmax(-1), (-x).softmax(-1)), dim=-1)
