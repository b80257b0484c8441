"""What attention with exact keys refuses, with one sentence that names the argument."""

import pytest
import torch

from lln import (
    InvalidInputError,
    UnexpectedArgumentError,
    calibrate_keys,
    choose_keys,
    lln_keys_attention,
    lln_keys_attention_varlen,
)
from lln.testing import make_qkv

B, H, T, D = 2, 4, 20, 8
Q, K, V = make_qkv(B, H, T, D)
PACKED = [side[0].transpose(0, 1) for side in (Q, K, V)]
BOUNDS = torch.tensor([0, 8, T])
GIVEN = {"alpha": 1.0, "beta": 1.0, "offset": 0.0}


def dense(**options):
    return lambda: lln_keys_attention(Q, K, V, **{"block_size": 8, **options})


def packed(**options):
    return lambda: lln_keys_attention_varlen(*PACKED, BOUNDS, **{"block_size": 8, **options})


def chosen(**options):
    return lambda: choose_keys(Q, K, **{"block_size": 8, **options})


def indices(*shape, **options):
    return torch.zeros(shape, **{"dtype": torch.int64, **options})


COUNT = "keys must be an integer of at least 0, got "
WRONG = [
    # keys
    (dense(keys=-1), f"^{COUNT}-1"),
    (packed(keys=-1), f"^{COUNT}-1"),
    (chosen(keys=-1), f"^{COUNT}-1"),
    (dense(keys=2.0), f"^{COUNT}float 2.0"),
    (dense(keys=True), f"^{COUNT}True"),
    (dense(keys="64"), f"^{COUNT}str '64'"),
    (dense(keys=None), f"^{COUNT}None"),
    (dense(keys=[1, 2]), f"^{COUNT}list"),
    (chosen(keys=True), f"^{COUNT}True"),
    (chosen(keys=indices(B, H, 3, 2)), f"^{COUNT}Tensor"),
    (dense(keys=indices(B, H, 3, 2).float()), "^keys must be .* int32 or int64, got torch.float32"),
    (dense(keys=indices(B, H, 3, 2).bool()), "^keys must be .* int32 or int64, got torch.bool"),
    (dense(keys=indices(B, H, 3, 2).short()), "^keys must be .* int64, got torch.int16"),
    (dense(keys=indices(B, H, 2, 2)), r"^keys must be .*\[2, 4, 3, K\] .* shape \[2, 4, 2, 2\]"),
    (dense(keys=indices(1, H, 3, 2)), r"^keys must be indices .* got shape \[1, 4, 3, 2\]"),
    (dense(keys=indices(B, 1, 3, 2)), r"^keys must be indices .* got shape \[2, 1, 3, 2\]"),
    (dense(keys=indices(H, 3, 2)), r"^keys must be indices .* got shape \[4, 3, 2\]"),
    (dense(keys=indices()), r"^keys must be indices .* got shape \[\]"),
    (
        dense(keys=indices(B, H, 3, 2), key_mask=torch.ones(B, T, dtype=torch.bool)),
        r"^keys must be indices .* = \[2, 4, 4, K\] .* key_mask",
    ),
    (dense(keys=indices(B, H, 3, 2), group_size=4), r"^keys must be .* = \[2, 4, 6, K\]"),
    (packed(keys=indices(H, 3, 2)), r"^keys must be indices \[H, G, K\] = \[4, 4, K\]"),
    (packed(keys=indices(1, H, 4, 2)), r"^keys must be indices .* got shape \[1, 4, 4, 2\]"),
    (dense(keys=indices(B, H, 3, 2, device="meta")), "^keys must be on the device .* meta and cpu"),
    (dense(keys=indices(B, H, 3, 2).to_sparse()), r"^keys is a sparse tensor .*keys\.to_dense"),
    # offset
    (dense(offset=torch.zeros(3)), r"^offset must be .* = \[2, 4, 1, 1\], got shape \[3\]"),
    (dense(offset=torch.zeros(H)), r"^offset must be .* give offset.view\(4, 1, 1\)"),
    (dense(offset=torch.zeros(B, H)), r"^offset must be .* give offset.view\(2, 4, 1, 1\)"),
    (dense(offset=torch.zeros(B, H, T, 1)), r"^offset must be .* got shape \[2, 4, 20, 1\]"),
    (dense(offset=torch.zeros(1, B, H, 1, 1)), r"^offset must be .* shape \[1, 2, 4, 1, 1\]"),
    (packed(offset=torch.zeros(3, H, 1, 1)), r"^offset must be .* got shape \[3, 4, 1, 1\]"),
    (dense(offset=torch.nan), "^offset must be a finite number or a tensor, got nan"),
    (dense(offset=torch.inf), "^offset must be a finite number or a tensor, got inf"),
    (dense(offset=True), "^offset must be a finite number or a tensor, got True"),
    (dense(offset="0"), "^offset must be a finite number or a tensor, got '0'"),
    (dense(offset=torch.tensor(torch.nan)), "^offset must be finite everywhere"),
    (dense(offset=torch.full((H, 1, 1), -torch.inf)), "^offset must be finite everywhere"),
    (dense(offset=torch.zeros((), dtype=torch.int64)), "^offset must be float64, .* torch.int64"),
    (dense(offset=torch.ones((), dtype=torch.bool)), "^offset must be float64, .* torch.bool"),
    (
        dense(offset=torch.zeros(H, 1, 1, device="meta")),
        "^offset must be on the device of query, got meta and cpu",
    ),
    # The choice
    (dense(group_size=3), "^group_size must divide block_size, got 3 and 8"),
    (dense(group_size=16), "^group_size must divide block_size, got 16 and 8"),
    (chosen(group_size=5), "^group_size must divide block_size, got 5 and 8"),
    (dense(group_size=0), "^group_size must be an integer of at least 1, got 0"),
    (dense(group_size=2.0), "^group_size must be an integer of at least 1, got float 2.0"),
    # Numbers and matching
    (dense(matching="rests"), r"^matching must be one of 'rest', .*\(did you mean 'rest'\?\)"),
    (packed(matching=1), "^matching must be one of 'rest', 'variance', 'entropy', 'paper', got 1"),
    (dense(alpha=1.0), "^alpha was given without beta"),
    (dense(beta=1.0), "^beta was given without alpha"),
    (dense(alpha=-1.0, beta=1.0), "^alpha must be positive"),
    (dense(alpha=1.0, beta=torch.ones(3, 1, 1)), "^beta must be a number or broadcast"),
    # Blocks and scale
    (dense(block_size=0), "^block_size must be at least 1, got 0"),
    (dense(block_size=8.0), "^block_size must be a positive integer, got float"),
    (chosen(block_size=True), "^block_size must be a positive integer, got bool"),
    (dense(scale=0.0), "^scale must be finite and not zero"),
    (chosen(scale=torch.nan), "^scale must be finite and not zero"),
    # Shapes
    (
        lambda: lln_keys_attention(Q[:, :, :5], K, V),
        "^lln_keys_attention pairs queries and keys .* T = 5 and S = 20",
    ),
    (lambda: choose_keys(Q, K[:, :, :5]), "^choose_keys pairs .* T = 20 and S = 5"),
    (lambda: lln_keys_attention(Q, K[:, :2], V[:, :2]), "enable_gqa=True"),
    (lambda: choose_keys(Q, K[:, :2]), "enable_gqa=True"),
    (lambda: lln_keys_attention(Q[0], K[0], V[0]), "^query must have 4 dimensions"),
    (dense(key_mask=torch.ones(B, T)), "^key_mask must be bool"),
    (chosen(key_mask=torch.ones(B, 3, dtype=torch.bool)), r"^key_mask must be \[B, S\]"),
    (packed(key_mask=torch.ones(1, T, dtype=torch.bool)), "^key_mask and cu_seqlens cannot be"),
    (
        lambda: lln_keys_attention_varlen(*PACKED, torch.tensor([0, 8])),
        "^cu_seqlens must end at the number of tokens 20, got 8",
    ),
    # Switches
    (dense(is_causal=1), "^is_causal must be True or False, got 1"),
    (chosen(is_causal="yes"), "^is_causal must be True or False, got 'yes'"),
    (dense(impl="cuda"), "^impl must be one of"),
    (chosen(impl="eagre"), r"^impl must be .*\(did you mean 'eager'\?\)"),
]
CAUSAL = [
    dense(is_causal=True),
    dense(is_causal=True, **GIVEN),
    packed(is_causal=True, **GIVEN),
    chosen(is_causal=True),
    lambda: calibrate_keys(Q, K, V, is_causal=True),
]
UNEXPECTED = [
    (dense(dropout_p=0.1), "^lln_keys_attention has no argument 'dropout_p'"),
    (packed(dropout_p=0.1), "^lln_keys_attention_varlen has no argument 'dropout_p'"),
    (dense(mix=0.5), "^lln_keys_attention has no argument 'mix'"),
    (dense(key=K), "^lln_keys_attention got key twice"),
    (dense(attn_mask=K), "^lln_keys_attention has no attn_mask"),
    (dense(groupsize=4), r"did you mean 'group_size'\?"),
    (chosen(values=V), "^choose_keys has no argument 'values'"),
    (lambda: choose_keys(Q), "^choose_keys needs key"),
    (lambda: lln_keys_attention(Q, K, V, 64), "^lln_keys_attention takes query, key and value by"),
]


def is_one_sentence(message):
    return "\n" not in message and message.endswith(".") and len(message) < 400


@pytest.mark.parametrize(("call", "said"), WRONG)
def test_refusals(call, said):
    with pytest.raises(InvalidInputError, match=said) as caught:
        call()
    assert is_one_sentence(str(caught.value)), caught.value


@pytest.mark.parametrize("call", CAUSAL)
def test_causal_calls_are_sent_to_pages(call):
    with pytest.raises(InvalidInputError, match=r"never causal: use lln\.page_attention") as caught:
        call()
    assert is_one_sentence(str(caught.value)), caught.value


@pytest.mark.parametrize(("call", "said"), UNEXPECTED)
def test_unexpected_arguments(call, said):
    with pytest.raises(UnexpectedArgumentError, match=said) as caught:
        call()
    assert is_one_sentence(str(caught.value)), caught.value


@pytest.mark.parametrize(
    "call",
    [
        dense(),
        dense(keys=0),
        dense(keys=10**6),
        dense(keys=indices(B, H, 3, 0)),
        dense(keys=indices(B, H, 3, 40, dtype=torch.int32)),
        dense(group_size=1),
        dense(offset=torch.zeros(())),
        dense(offset=torch.zeros(1)),
        dense(offset=-3),
        dense(offset=torch.zeros(H, 1, 1, dtype=torch.float16)),
        dense(**GIVEN),
        packed(keys=indices(H, 4, 2)),
        packed(keys=10**6),
        packed(**GIVEN),
        packed(offset=torch.zeros(2, 1, 1, 1)),
    ],
)
def test_what_is_right_is_taken(call):
    assert call().isfinite().all()
