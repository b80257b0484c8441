"""α, β and the offset of attention with exact keys, found on real activations.

`lln.matching.rest_search` has the search; here its arguments are checked, and its doubts said.
"""

from __future__ import annotations

import warnings

from torch import Tensor

from lln import checks
from lln.checks.key_options import check_group_size, check_not_causal
from lln.checks.names import check_choice
from lln.errors import CalibrationWarning
from lln.matching.calibration import count_tokens, sentences_of_doubt
from lln.matching.rest_search import KeyChoice, entropy_temperatures, find_rest


def calibrate_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    keys: int = 64,
    block_size: int = 64,
    group_size: int | None = None,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scope: str = "head",
    rows: int = 256,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """α, β and offset that `lln.lln_keys_attention` needs to follow softmax attention here.

    Args:
        query: ``[B, H, T, D]``, activations of a real model.
        key: ``[B, Hk, T, D]``; H a multiple of Hk.
        value: ``[B, Hk, T, E]``.
        keys: As the attention will choose them, and likewise the next two.
        block_size: Tokens in a block.
        group_size: Queries that share their keys; None = a block.
        key_mask: bool ``[B, T]``, True = attend; it also says which queries count.
        is_causal: Must be False, as in `lln.lln_keys_attention`.
        scope: ``"head"``: for every sample and head; ``"batch"``: one value per head for the whole
            batch, to freeze into a model.
        rows: Query rows of every sample to measure on, evenly spaced over the valid ones.
        scale: Factor of the softmax scores; None = 1/√D.

    Returns:
        ``(alpha, beta, offset)``, each ``[B, H, 1, 1]`` (``[1, H, 1, 1]`` for scope ``"batch"``),
        detached. The offset is -1e30, which takes the slots away, for heads whose output is nearest
        to softmax attention's without them. Where every key is exact, so that the slots have
        nothing to carry, it is the closed form of `lln.matching.mass`.

    Raises:
        InvalidInputError: If no sequence has two tokens.

    Warns:
        CalibrationWarning: As `lln.calibrate`, or if a block and its keys cover every sequence.

    Example:
        >>> import torch
        >>> generator = torch.Generator().manual_seed(0)
        >>> query, key, value = torch.randn(3, 1, 1, 512, 32, generator=generator)
        >>> alpha, beta, offset = calibrate_keys(query, key, value, keys=32)
        >>> f"{alpha.item():.1f} {offset.item():.0f}"
        '0.9 -3'
    """
    checks.check_qkv(query, key, value, layout="dense", enable_gqa=True)
    checks.check_self_attention(query, key, "calibrate_keys")
    checks.check_key_mask(key_mask, key)
    check_not_causal(is_causal)
    checks.check_blocks(block_size, scale)
    checks.check_count("keys", keys, 0)
    group = check_group_size(group_size, block_size)
    check_choice("scope", scope, ("head", "batch"))
    checks.check_count("rows", rows)
    pooled = scope == "batch"
    choice = KeyChoice(keys, block_size, group)
    start = entropy_temperatures(query, key, key_mask, pooled, scale)
    alpha, beta, offset = find_rest(
        query, key, value, *start, key_mask, pooled, choice, rows=rows, scale=scale
    )
    sentences = sentences_of_doubt(query, key, key_mask, alpha, beta, pooled)
    longest = max(count_tokens(key, key_mask).tolist(), default=0)
    for sentence in (*sentences, *doubts_of_length(longest, block_size, keys)):
        warnings.warn(sentence, CalibrationWarning, stacklevel=2)
    return alpha, beta, offset


def doubts_of_length(longest: int, block_size: int, keys: int) -> list[str]:
    """A sentence that warns of sequences in which nearly every key is exact."""
    if not 1 < longest <= block_size + keys:
        return []
    return [
        f"the longest of these sequences has {longest} tokens, and a row sees {block_size} in its "
        f"block and {keys} exact keys: next to nothing is left for the slots, so their offset is a "
        f"guess; calibrate on sequences as long as those to come, of more than "
        f"{block_size + keys} tokens."
    ]
