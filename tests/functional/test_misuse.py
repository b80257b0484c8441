"""Things of the wrong kind, wherever the public names take them, get one sentence each."""

import numpy as np
import pytest
import torch

import lln
from lln import InvalidInputError, instruments

B, H, T, D = 2, 4, 6, 8
GENERATOR = torch.Generator().manual_seed(0)
Q, K, V = torch.randn(3, B, H, T, D, generator=GENERATOR).unbind()
ONE = [side[:, :, :1] for side in (Q, K, V)]
PACKED = [side[0].transpose(0, 1) for side in (Q, K, V)]
X = torch.randn(B, T, H * D, generator=GENERATOR)
ARRAY = np.ones((B, H, T, D), dtype=np.float32)
P = torch.full((B, H, T, T), 1 / T)
SIZES = {"embed_dim": H * D, "num_heads": H, "max_len": 8}
LAYERS = (lln.LLNAttention, lln.LLNDiagAttention, lln.LLNKeysAttention, lln.WindowAttention)
LAYER = lln.LLNAttention(H * D, H, batch_first=True)


def summary(**changed):
    return lln.KeySummary.of(K.to(**changed), V.to(**changed), 2.0)


def empty(**changed):
    sizes = {"batch": 2, "heads": 4, "head_width": 8, "value_width": 8} | changed
    return lln.KeySummary.empty(**sizes, beta=2.0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        # Numbers that are arrays: their type is named, not all they hold.
        (lambda: lln.lln_attention(Q, K, V, dropout_p=Q), "dropout_p .* got Tensor"),
        (lambda: lln.lln_diag_attention(Q, K, V, mix=ARRAY), "mix .* got ndarray"),
        (lambda: lln.calibrate(Q, K, rows=ARRAY), "rows .* got ndarray"),
        (lambda: lln.LLNCore(H, D, momentum=Q), "momentum .* got Tensor"),
        # Flags
        (lambda: lln.lln_attention(Q, K, V, is_causal=Q), "is_causal must be True or False"),
        (lambda: lln.lln_attention(Q, K, V, is_causal="no"), "is_causal must be .* got 'no'"),
        (lambda: lln.lln_attention(Q, K, V, enable_gqa=Q), "enable_gqa must be True or False"),
        (lambda: lln.lln_diag_attention(Q, K, V, is_causal=1), "is_causal must be .* got 1"),
        (
            lambda: lln.block_diagonal_attention(Q, K, V, block_size=4, is_causal=None),
            "is_causal must be .* got None",
        ),
        (
            lambda: lln.lln_attention_varlen(*PACKED, torch.tensor([0, T]), is_causal=Q),
            "is_causal must be True or False",
        ),
        (lambda: instruments.entropy(Q, K, is_causal=Q), "is_causal must be True or False"),
        (lambda: lln.LLNCore(H, D)(Q, K, V, is_causal=Q), "is_causal must be True or False"),
        (lambda: LAYER(X, need_weights=X), "need_weights must be True or False"),
        # Summaries
        (lambda: summary().merge(None), "merged with another KeySummary, got NoneType"),
        (lambda: summary().merge(summary(device="meta")), "one device, got cpu and meta"),
        (lambda: summary().read(ARRAY, 1.0), "query must be a torch.Tensor, got ndarray"),
        (lambda: summary().read(Q.to_sparse(), 1.0), r"query\.to_dense\(\)"),
        (lambda: lln.decode_step(*ONE, [], alpha=1.0), "summary must be a KeySummary, got list"),
        (lambda: empty(batch="2"), "batch must be an integer of at least 0, got str '2'"),
        (lambda: empty(heads=-1), "heads must be an integer of at least 0, got -1"),
        (lambda: empty(head_width=0), "head_width must be an integer of at least 1, got 0"),
        (lambda: empty(value_width=2.5), "value_width must be an integer .* got float 2.5"),
        (lambda: empty(dtype="float32"), "dtype must be float64, .* got 'float32'"),
        (lambda: empty(dtype=torch.int64), "dtype must be float64, .* got torch.int64"),
        # Modules
        (lambda: LAYER([1.0]), "query must be a torch.Tensor, got list"),
        (lambda: LAYER(X, None, ARRAY), "value must be a torch.Tensor, got ndarray"),
        (lambda: LAYER(X.to_sparse()), r"query\.to_dense\(\)"),
        (lambda: LAYER(X[0], X, X), "the same number of dimensions, got 2, 3 and 3"),
        (lambda: LAYER(X.double()), "query is torch.float64 .* weights .* torch.float32"),
        (lambda: LAYER(X.long()), "query is torch.int64 .* weights .* torch.float32"),
        (lambda: LAYER(X.to("meta")), "query is on meta .* weights .* cpu"),
        (lambda: LAYER(X, key_padding_mask=[0]), "key_padding_mask must be .* got list"),
        (lambda: LAYER(X, key_padding_mask=P[0, 0].to_sparse()), r"key_padding_mask\.to_dense\(\)"),
        (lambda: LAYER(X, key_padding_mask=X[:, :, 0].to("meta") == 0), "device .* meta and cpu"),
        (lambda: lln.LLNAttention("32", 4), "multiple of num_heads, got '32' and 4"),
        (lambda: lln.LLNAttention(32, None), "multiple of num_heads, got 32 and None"),
        (lambda: lln.LLNAttention(32, True), "multiple of num_heads, got 32 and True"),
        (lambda: lln.LLNAttention(32, 4, kdim=0), "kdim must be an integer of at least 1, got 0"),
        (lambda: lln.LLNAttention(32, 4, vdim="8"), "vdim must be an integer .* got str '8'"),
        (lambda: lln.LLNCore(0, 8), "num_heads must be an integer of at least 1, got 0"),
        (lambda: lln.LLNCore(4, 8.0), "head_dim must be an integer .* got float 8.0"),
        (lambda: lln.LLNDiagCore(4, 8, value_dim="8"), "value_dim must be an integer"),
        (
            lambda: lln.LLNDiagCore(4, 8, join="heads", lln_heads=1.5),
            "lln_heads must be an integer .* got float 1.5",
        ),
        (
            lambda: lln.LLNCore(4, 8, statistics="fixed", alpha="2"),
            "alpha must be a number or have one value per head .* got '2'",
        ),
        (
            lambda: lln.LLNCore(4, 8, statistics="learned", beta={}),
            "beta must be a number or have one value per head .* got dict",
        ),
        # Instruments
        (lambda: instruments.of_matrix.entropy(P.to("meta")), "matrix .* meta"),
        (lambda: instruments.of_matrix.entropy(P.to_sparse()), r"matrix\.to_dense\(\)"),
        (lambda: instruments.of_matrix.log_normality([1.0]), "matrix must be .* got list"),
        (lambda: instruments.of_matrix.spectral_gap(ARRAY), "matrix must be .* got ndarray"),
        (lambda: instruments.capture(LAYER, instruments=None), "instruments must be .* NoneType"),
        (lambda: instruments.capture(LAYER, instruments=3), "instruments must be .* int"),
    ],
)
def test_misuse_gets_a_sentence(call, said):
    with pytest.raises(InvalidInputError, match=said) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 300, message


def test_what_is_right_stays_right():
    assert LAYER(X[0])[0].shape == (T, H * D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert LAYER(X.bfloat16())[0].dtype == torch.bfloat16
    meta = lln.LLNAttention(H * D, H, batch_first=True, device="meta")
    assert meta(X.to("meta"))[0].is_meta
    assert lln.LLNCore(4, 8, statistics="fixed", alpha=[1.0, 2.0, 1.0, 2.0]).num_heads == 4
    assert empty(batch=0).centroid.shape == (0, 4, 8, 8)


SUMMARY = summary()
RECORDED = {
    "lln": lambda: lln.lln_attention(Q, K, V),
    "causal": lambda: lln.lln_attention(Q, K, V, alpha=1.0, beta=1.0, is_causal=True),
    "diag": lambda: lln.block_diagonal_attention(Q, K, V, block_size=4),
    "lln_diag": lambda: lln.lln_diag_attention(Q, K, V),
    "keys": lambda: lln.lln_keys_attention(Q, K, V),
    "window": lambda: lln.window_attention(Q, K, V, window=4),
    "pages": lambda: lln.page_attention(Q, K, V),
    "choose_pages": lambda: lln.choose_pages(Q, K),
    "choose_keys": lambda: lln.choose_keys(Q, K),
    "match_moments": lambda: lln.match_moments(Q, K),
    "calibrate": lambda: lln.calibrate(Q, K),
    "calibrate_keys": lambda: lln.calibrate_keys(Q, K, K),
    "varlen": lambda: lln.lln_attention_varlen(*PACKED, torch.tensor([0, T])),
    "diag_varlen": lambda: lln.lln_diag_attention_varlen(*PACKED, torch.tensor([0, T])),
    "keys_varlen": lambda: lln.lln_keys_attention_varlen(*PACKED, torch.tensor([0, T])),
    "window_varlen": lambda: lln.window_attention_varlen(*PACKED, torch.tensor([0, T]), window=4),
    "summary": lambda: summary().log_mass,
    "read": lambda: SUMMARY.read(Q, 2.0),
    "decode_step": lambda: lln.decode_step(*ONE, empty(), alpha=1.0),
    **{
        kind.__name__: lambda kind=kind: kind(H * D, H, batch_first=True)(X, X, X)[0]
        for kind in LAYERS
    },
    **{
        kind.__name__: lambda kind=kind: kind(H, D)(Q, K, V)
        for kind in (lln.LLNCore, lln.LLNDiagCore, lln.LLNKeysCore, lln.WindowCore)
    },
}


# PyTorch warns of each value that a check reads.
recorded = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning"
)


@recorded
@pytest.mark.parametrize("name", RECORDED)
def test_recordings_of_one_run_are_refused(name):
    """Lengths and values decide how a call runs: for other inputs they would be wrong."""
    with pytest.raises(lln.BackendUnavailableError, match=r"torch\.export\.export, or .*=True"):
        torch.jit.trace(lambda _: RECORDED[name](), (torch.ones(1),), check_trace=False)


@recorded
def test_the_old_way_to_onnx_is_refused(tmp_path):
    with pytest.raises(lln.BackendUnavailableError, match="dynamo=True"):
        torch.onnx.export(LAYER, (X, X, X), str(tmp_path / "layer.onnx"), dynamo=False)
