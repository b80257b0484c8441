"""Perplexity and copying are what their names say."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lln_lab.experiments.decoder_conversion import measure, texts_of


def test_perplexity_and_the_loss_on_what_is_said_again():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=30, **sizes, **heads)).eval()
    texts = torch.randint(30, (5, 12))
    found = measure(model, texts)
    with torch.no_grad():
        each = [model(one[None], labels=one[None]).loss for one in texts]
        twice = texts[:, :6].repeat(1, 2)
        scores = model(twice).logits[:, 6:-1].log_softmax(-1)
    assert found["perplexity"] == pytest.approx(torch.stack(each).mean().exp().item(), rel=1e-5)
    copied = -scores.gather(-1, twice[:, 7:, None]).mean().item()
    assert found["copy"] == pytest.approx(copied, rel=1e-5)
    assert found["texts"] == 5


def test_texts_are_whole_stretches():
    def words(text, **_):
        return {"input_ids": torch.tensor([[len(word) for word in text.split()]])}

    assert texts_of("a bb ccc d ee", words, 2).tolist() == [[1, 2], [3, 1]]
