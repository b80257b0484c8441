"""A text means the same with padding before it: diagonal blocks begin at its first token."""

import inspect

import pytest
import torch
import transformers

from lln.errors import LLNError
from lln.integrations.cache import LLNCache
from lln.integrations.convert import convert
from lln.integrations.streaming import Past, short_range
from lln.reference import block_diagonal_attention

BLOCK, TOKENS = 4, 11
SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 37,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
OWN = {
    "GPTBigCode": {"num_key_value_heads": 1},
    "Mistral": {"sliding_window": None},
    "Qwen2": {"use_sliding_window": False},
}
# Every family of decoders whose attention goes through transformers' interface, has no window, soft
# cap or sinks, and is small enough to build here.
FAMILIES = [
    "Apertus",
    "Arcee",
    "BioGpt",
    "BitNet",
    "Cohere",
    "Ernie4_5",
    "Gemma",
    "Glm",
    "Glm4",
    "GPT2",
    "GPTBigCode",
    "GPTNeoX",
    "Granite",
    "Helium",
    "HunYuanDenseV1",
    "Llama",
    "Mistral",
    "Nemotron",
    "Olmo",
    "Olmo2",
    "OPT",
    "Persimmon",
    "Phi",
    "Phi3",
    "Qwen2",
    "Qwen3",
    "SeedOss",
    "SmolLM3",
    "StableLm",
    "Starcoder2",
]


def model_of(family):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SIZES | OWN.get(family, {})))
    names = (f"{family}ForCausalLM", f"{family}LMHeadModel")
    kind = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    return kind(config).eval()


def padded(paddings, total):
    """One text in every row, behind so many padded tokens and before as many as fill the row."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(3, 99, (TOKENS,), generator=generator)
    ids = torch.zeros(len(paddings), total, dtype=torch.long)
    for row, padding in enumerate(paddings):
        ids[row, padding : padding + TOKENS] = text
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def logits_of(model, inputs):
    """Logits of the text's own tokens, a row for each."""
    mask = inputs["attention_mask"]
    options = {}
    if "position_ids" in inspect.signature(model.forward).parameters:
        options["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        logits = model(**inputs, **options, use_cache=False).logits
    return torch.stack([row[kept] for row, kept in zip(logits, mask.bool(), strict=True)])


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_changes_nothing(tiny, family):
    model = model_of(family)
    alone = padded([0], TOKENS)
    convert(model, "lln_diag", calibrate=alone, block_size=BLOCK, verbose=False)
    expected = logits_of(model, alone)
    paddings = range(1, 2 * BLOCK + 1)
    found = logits_of(model, padded(paddings, 2 * BLOCK + TOKENS))
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    generated = model.generate(**alone, max_new_tokens=2 * BLOCK + 1, do_sample=False)[0, TOKENS:]
    for padding in (1, 3, BLOCK, BLOCK + 1):
        inputs = padded([padding], padding + TOKENS)
        out = model.generate(**inputs, max_new_tokens=2 * BLOCK + 1, do_sample=False)
        assert torch.equal(out[0, padding + TOKENS :], generated)


@pytest.mark.parametrize("pieces", [[5, 1, 1, 13], [1] * 20, [9, 11]])
def test_rows_that_begin_at_different_tokens_go_on_in_their_own_blocks(pieces):
    """Padding before, and holes inside: at the first token of a block, too."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 5, 2, 20, 8, dtype=torch.float64)
    first = torch.tensor([0, 3, 4, 6, 20])
    mask = torch.arange(20) >= first[:, None]
    mask[1, 7], mask[2, 8:12], mask[3, 11] = False, False, False
    keep = mask[:, None, None, :].expand(-1, 1, 20, -1) & torch.ones(20, 20).tril().bool()
    expected = block_diagonal_attention(query, key, value, BLOCK, keep=keep)
    past, outs, start = Past(), [], 0
    for size in pieces:
        part = slice(start, start + size)
        sides = [side[:, :, part] for side in (query, key, value)]
        outs.append(short_range(*sides, past, BLOCK, mask[:, part]))
        start += size
        assert past.block_key is not None
        assert past.block_key.shape[2] < BLOCK
    rows = mask[:, None, :, None]
    torch.testing.assert_close(
        torch.where(rows, torch.cat(outs, 2), 0.0), torch.where(rows, expected, 0.0)
    )


def test_packed_texts_are_cut_from_their_own_first_tokens(tiny):
    model = model_of("Llama")
    alone = padded([0], TOKENS)
    convert(model, "lln_diag", calibrate=alone, block_size=BLOCK, verbose=False)
    expected = logits_of(model, alone)[0]
    texts = [
        torch.tensor([5, 6, 7]),
        alone["input_ids"][0],
        torch.tensor([8]),
        alone["input_ids"][0],
    ]
    places = torch.cat([torch.arange(len(text)) for text in texts])
    with torch.no_grad():
        out = model(torch.cat(texts)[None], position_ids=places[None], use_cache=False).logits[0]
    for start in (3, 3 + TOKENS + 1):
        assert (out[start : start + TOKENS] - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_model_that_attends_twice_to_its_keys_is_refused(tiny):
    """The second call would continue the past with the same tokens once more."""
    model = model_of("DiffLlama")
    inputs = padded([0], TOKENS)
    convert(model, "lln", calibrate=inputs, verbose=False)
    with pytest.raises(LLNError, match="DynamicCache"):
        model.generate(**inputs, max_new_tokens=2, do_sample=False)
    options = {"max_new_tokens": 5, "do_sample": False}
    cache = transformers.DynamicCache()
    with pytest.warns(UserWarning, match="full key-value cache"):
        found = model.generate(**inputs, **options, past_key_values=cache)
    assert torch.equal(found, model.generate(**inputs, **options, use_cache=False))
    assert not isinstance(cache, LLNCache)
