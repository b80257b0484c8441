"""P by the paper's equations, N×N in float64, and what the instruments say of it, done plainly."""

import math

import numpy as np
import torch

from lln import choose_keys, match_moments, reference
from lln.matching.mass import mass_offset
from lln.matching.moments import head_moments

KINDS = ("softmax", "lln", "diag", "lln_diag", "window", "lln_keys")


def dense_matrix(
    query,
    key,
    *,
    kind="softmax",
    alpha=None,
    beta=None,
    block_size=None,
    mix=0.5,
    keep=None,
    is_causal=False,
    scale=None,
    window=64,
    **exact,
):
    """P of one sample, ``[H, T, S]``; keep is a bool mask over keys."""
    heads, tokens, width = query.shape
    key = key.repeat_interleave(heads // key.shape[0], 0)
    if kind == "lln_keys":
        own = {"keep": keep, "scale": scale, **exact}
        return dense_keys_matrix(query, key, alpha, beta, block_size or 64, **own)
    if kind in ("lln", "lln_diag") and alpha is None:
        mask = None if keep is None else keep[None]
        alpha, beta = (
            side[0].double() for side in match_moments(query[None], key[None], key_mask=mask)
        )
    seen = torch.ones(tokens, key.shape[1], dtype=torch.bool)
    if keep is not None:
        seen = seen & keep
        key = torch.where(keep[:, None], key, 0.0)
    if is_causal:
        seen = seen.tril()
    # Counted from the first token that is not masked.
    first = 0 if keep is None else int(keep.int().argmax())
    blocks = (torch.arange(tokens) - first).div(block_size or width, rounding_mode="floor")
    near = seen & (blocks[:, None] == blocks) if tokens == key.shape[1] else seen
    scores = reference.log_softmax_kernel(query, key, scale)
    if kind == "softmax":
        return reference.normalise(scores, seen)
    if kind == "window":
        place = torch.arange(tokens)
        return reference.normalise(scores, seen & ((place[:, None] - place).abs() <= window))
    short_range = reference.normalise(scores, near)
    if kind == "diag":
        return short_range
    long_range = reference.normalise(reference.log_lln_kernel(query, key, alpha, beta), seen)
    return long_range if kind == "lln" else mix * long_range + (1 - mix) * short_range


def dense_keys_matrix(
    query,
    key,
    alpha,
    beta,
    block_size,
    *,
    keep=None,
    scale=None,
    offset=None,
    keys=64,
    group_size=None,
):
    """P of exact keys of one sample; what is not given is matched and chosen."""
    tokens, mask = query.shape[1], None if keep is None else keep[None]
    sides = query[None], key[None]
    if alpha is None:
        matched = match_moments(*sides, criterion="entropy", key_mask=mask)
        alpha, beta = (side[0] / 2 for side in matched)
    if offset is None:
        moments = head_moments(*sides, mask)
        offset = mass_offset(moments, alpha, beta, query.shape[-1], scale)[0].double()
    if isinstance(keys, torch.Tensor):
        indices = keys[None]
    else:
        own = {"group_size": group_size, "scale": scale}
        own |= {"block_size": block_size, "key_mask": mask}
        indices = choose_keys(*sides, keys, **own)
    pairs = torch.ones(1, 1, tokens, tokens, dtype=torch.bool)
    pairs = pairs if keep is None else pairs & keep
    # Blocks are counted from the first key that a row may see: only the mask says which.
    seen = None if keep is None else pairs
    exact = reference.exact_pairs(indices, tokens, block_size, group_size or block_size, keep=seen)
    exact = exact & pairs
    alpha, beta = (torch.as_tensor(side, dtype=torch.float64) for side in (alpha, beta))
    numbers = (alpha, beta, exact, offset)
    return reference.lln_keys_matrix(*sides, *numbers, keep=pairs, scale=scale)[0]


def only_valid(matrix, keep):
    """The rows and columns that count."""
    if keep is None:
        return matrix
    matrix = matrix[..., keep]
    return matrix[:, keep] if keep.shape[0] == matrix.shape[-2] else matrix


def dense_entropy(matrix):
    return -torch.special.xlogy(matrix, matrix).sum(-1).mean(-1) / math.log(2)


def dense_gap(matrix):
    moduli = (
        torch.from_numpy(np.abs(np.linalg.eigvals(matrix.numpy()))).sort(-1, descending=True).values
    )
    return 1 - moduli[..., 1] if moduli.shape[-1] > 1 else matrix.new_ones(matrix.shape[0])


def dense_variance(matrix):
    return matrix.flatten(1).var(-1, correction=0)


def dense_log_moments(matrix):
    """Mean, variance, mean row variance, skew, excess kurtosis, KS distance: ``[H]`` each."""
    found = []
    for head in matrix:
        logs = head[head > 0].log()
        centred = logs - logs.mean()
        spread = centred.square().mean().sqrt()
        rows = torch.stack([row[row > 0].log().var(correction=0) for row in head])
        ordered = (centred / spread).sort().values
        normal = torch.distributions.Normal(0, 1).cdf(ordered)
        above = torch.arange(1, len(ordered) + 1).double() / len(ordered)
        below = torch.arange(len(ordered)).double() / len(ordered)
        ks = torch.maximum((above - normal).max(), (normal - below).max())
        found.append(
            torch.stack(
                [
                    logs.mean(),
                    spread**2,
                    rows.mean(),
                    (centred / spread).pow(3).mean(),
                    (centred / spread).pow(4).mean() - 3,
                    ks,
                ]
            )
        )
    return torch.stack(found, -1)
