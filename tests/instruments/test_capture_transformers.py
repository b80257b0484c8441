"""capture on tiny random Hugging Face models: the same outputs to the bit, the right numbers."""

import pytest
import torch
from tests.checkpointing import checkpoint_layers
from transformers import (
    BertConfig,
    BertModel,
    DebertaV2Config,
    DebertaV2Model,
    Gemma2Config,
    Gemma2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralModel,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTModel,
)
from transformers.modeling_utils import AttentionInterface

from lln.errors import InvalidInputError
from lln.instruments.capture import capture
from lln.integrations.convert import convert

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
LOCAL = {**GROUPED, "head_dim": 8, "sliding_window": 4}
MODELS = {
    "bert": (BertModel, BertConfig, SIZES),
    "roberta": (RobertaModel, RobertaConfig, SIZES),
    "vit": (ViTModel, ViTConfig, {**SIZES, "image_size": 16, "patch_size": 4}),
    "llama": (LlamaModel, LlamaConfig, GROUPED),
    "mistral": (MistralModel, MistralConfig, LOCAL),
    "gemma2": (Gemma2Model, Gemma2Config, LOCAL),
    "t5": (
        T5EncoderModel,
        T5Config,
        {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4},
    ),
}
LAYERS = {
    "bert": "encoder.layer.{}.attention.self",
    "roberta": "encoder.layer.{}.attention.self",
    "vit": "layers.{}.attention",
    "llama": "layers.{}.self_attn",
    "mistral": "layers.{}.self_attn",
    "gemma2": "layers.{}.self_attn",
    "t5": "encoder.block.{}.layer.0.SelfAttention",
}
FOUR = ("bert", "roberta", "vit", "llama")


def make(name, implementation):
    model, config, sizes = MODELS[name]
    torch.manual_seed(0)
    model = model(config(**sizes, attn_implementation=implementation))
    # Random weights are nearly uniform in their attention: sharpen it, so that there is something
    # to measure.
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith(("query.weight", "key.weight", "q_proj.weight", "k_proj.weight")):
                parameter.mul_(20)
    return model.eval()


def inputs(name, padded=True):
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    tokens = torch.randint(3, 40, (2, 11), generator=generator)
    mask = torch.ones(2, 11, dtype=torch.long)
    if padded:
        mask[1, 7:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def dense_entropy(weights):
    weights = weights.double()
    return -(weights * weights.clamp_min(1e-300).log2()).sum(-1).mean(-1)


def dense_gap(weights):
    values = torch.linalg.eigvals(weights.double()).abs().sort(-1, descending=True).values
    return 1 - values[..., 1]


@pytest.fixture(autouse=True)
def _interface_is_put_back():
    before = AttentionInterface.get_interface
    yield
    assert AttentionInterface.get_interface is before


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FOUR)
def test_outputs_to_the_bit_and_values_as_the_models_own_weights(name, implementation):
    model, batch = make(name, implementation), inputs(name)
    with torch.no_grad():
        weights = make(name, "eager")(**batch, output_attentions=True).attentions
        before = model(**batch).last_hidden_state
        with capture(model) as seen:
            after = model(**batch).last_hidden_state
    assert torch.equal(before, after)
    assert not seen.problems
    assert seen.layers == [LAYERS[name].format(layer) for layer in range(2)]
    for call, expected in zip(seen.calls, weights, strict=True):
        lengths = (expected.shape[-1], expected.shape[-1] if name == "vit" else 7)
        own = [part[:, :n, :n] for part, n in zip(expected, lengths, strict=True)]
        entropy = torch.stack([dense_entropy(part) for part in own])
        torch.testing.assert_close(call.values["entropy"], entropy, rtol=0, atol=1e-5)
        gap = torch.stack([dense_gap(part) for part in own])
        torch.testing.assert_close(call.values["spectral_gap"], gap, rtol=0, atol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FOUR)
def test_training_with_dropout_is_bit_equal(name, implementation):
    batch = inputs(name)

    def gradients(watch):
        model = make(name, implementation).train()
        torch.manual_seed(7)
        if watch:
            with capture(model) as seen:
                model(**batch).last_hidden_state.square().mean().backward()
            assert len(seen.calls) == 2
        else:
            model(**batch).last_hidden_state.square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for plain, watched in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, watched)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_is_measured_once(use_reentrant):
    model = make("bert", "sdpa").train()
    checkpoint_layers(model, use_reentrant)
    with capture(model) as seen:
        model(**inputs("bert")).last_hidden_state.sum().backward()
    assert [call.call for call in seen.calls] == [0, 0]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["mistral", "t5"])
def test_windows_and_position_biases_are_measured_from_the_matrix(name, implementation):
    model, batch = make(name, implementation), inputs(name, padded=False)
    with torch.no_grad():
        weights = make(name, "eager")(**batch, output_attentions=True).attentions
        before = model(**batch).last_hidden_state
        with capture(model) as seen:
            after = model(**batch).last_hidden_state
    assert torch.equal(before, after)
    assert not seen.problems
    assert seen.layers == [LAYERS[name].format(layer) for layer in range(2)]
    for call, expected in zip(seen.calls, weights, strict=True):
        entropy = dense_entropy(expected)
        torch.testing.assert_close(call.values["entropy"], entropy, rtol=0, atol=1e-5)
        gap = dense_gap(expected)
        torch.testing.assert_close(call.values["spectral_gap"], gap, rtol=0, atol=1e-5)


def test_soft_caps_are_measured_from_the_models_own_weights_or_reported():
    model, batch = make("gemma2", "eager"), inputs("gemma2", padded=False)
    with torch.no_grad():
        weights = model(**batch, output_attentions=True).attentions
        with capture(model) as seen:
            model(**batch)
    for call, expected in zip(seen.calls, weights, strict=True):
        entropy = dense_entropy(expected)
        torch.testing.assert_close(call.values["entropy"], entropy, rtol=0, atol=1e-5)
    model.train()
    model.config.attention_dropout = 0.1
    for layer in model.layers:
        layer.self_attn.attention_dropout = 0.1
    with capture(model) as seen:
        model(**batch)
    assert all("'softcap'" in problem for problem in seen.problems.values())
    assert len(seen.problems) == 2


def test_generation_with_a_cache():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**GROUPED, pad_token_id=0)).eval()
    tokens = inputs("llama")["input_ids"][:1]
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    before = model.generate(tokens, **options)
    with capture(model) as seen:
        after = model.generate(tokens, **options)
    assert torch.equal(before, after)
    first = [call for call in seen.calls if call.layer == "model.layers.0.self_attn"]
    assert [(call.queries, call.keys) for call in first] == [(11, 11), (1, 12), (1, 13)]
    assert not seen.problems


def test_a_nan_weight_spoils_its_layer_and_those_above_only():
    model = make("bert", "sdpa")
    with torch.no_grad():
        model.encoder.layer[1].attention.self.key.weight[0, 0] = torch.nan
        with capture(model) as seen:
            model(**inputs("bert"))
    spoilt = "encoder.layer.1.attention.self"
    assert list(seen.problems) == [spoilt]
    assert seen.medians("entropy")["encoder.layer.0.attention.self"][0] > 0


def test_a_model_outside_the_interface_gets_a_sentence():
    sizes = {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    model = DebertaV2Model(DebertaV2Config(**sizes)).eval()
    error = pytest.raises(InvalidInputError, match="saw no attention in DebertaV2Model")
    with error, torch.no_grad(), capture(model):
        model(**inputs("bert"))


def test_a_model_converted_to_exact_keys():
    """Measured from what each layer announces: its α, β, offset and chosen keys."""
    model, batch = make("bert", "sdpa"), inputs("bert")
    # The fewest tokens that conversion trusts are 64.
    texts = {"input_ids": torch.randint(3, 40, (8, 11))}
    # An instrument sees exact keys where softmax would run.
    convert(model, "lln_keys", calibrate=texts, keys=2, block_size=4, or_softmax=False)
    with torch.no_grad():
        before = model(**batch).last_hidden_state
        with capture(model) as seen:
            after = model(**batch).last_hidden_state
    assert torch.equal(before, after)
    assert not seen.problems
    assert {call.kind for call in seen.calls} == {"lln_keys"}
    assert len(seen.layers) == 2
    for call in seen.calls:
        assert {"alpha", "beta", "offset", "entropy", "spectral_gap"} <= set(call.values)
        assert all(value.isfinite().all() for value in call.values.values())
