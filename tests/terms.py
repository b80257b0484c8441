"""What the gradients of α, β and mix are sums of, and what such sums round by."""

import torch

from lln import reference
from lln.testing import size_of_sum


def repeat_to(heads, *tensors):
    return [tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in tensors]


def kept_pairs(mask, causal, tokens, device=None):
    """The bool mask ``[B, 1, T, S]`` of the reference."""
    keep = None if mask is None else mask[:, None, None, :].expand(-1, 1, tokens, -1)
    if causal:
        earlier = reference.causal_keep(tokens, device)
        keep = earlier if keep is None else keep & earlier
    return keep


def sizes_of_sums(
    inputs, upstream, *, alpha, beta, mix=0.5, block_size=None, keep=None, scale=None
):
    """How large the gradients of α, β and mix are as sums, by name; numbers have none.

    What was broadcast has for gradient the sum of the gradients of what it was broadcast to.
    """
    query, key, value, upstream = (side.detach().double() for side in (*inputs, upstream))
    sides = {"alpha": (alpha, query), "beta": (beta, key), "mix": (mix, upstream)}
    if torch.is_tensor(beta) and beta.dim() == 4 and beta.shape[1] != key.shape[1]:
        sides["beta"] = (beta, *repeat_to(query.shape[1], key))
    terms = {
        name: side.detach().double().expand_as(like).clone().requires_grad_()
        for name, (side, like) in sides.items()
        if torch.is_tensor(side)
    }
    if not terms:
        return {}
    full = {name: terms.get(name, side) for name, (side, _) in sides.items()}
    if "beta" in terms:
        (full["beta"],) = repeat_to(query.shape[1], full["beta"])
    key, value = repeat_to(query.shape[1], key, value)
    if block_size is None:
        out = reference.lln_attention(query, key, value, full["alpha"], full["beta"], keep=keep)
    else:
        options = {"block_size": block_size, "keep": keep, "scale": scale}
        out = reference.lln_diag_attention(query, key, value, **full, **options)
    gradients = torch.autograd.grad(out, list(terms.values()), upstream)
    return {
        name: size_of_sum(gradient, sides[name][0].shape)
        for name, gradient in zip(terms, gradients, strict=True)
    }
