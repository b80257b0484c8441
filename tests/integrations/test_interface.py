"""Our attention functions inside Hugging Face models: the contract, refusals, and twelve traps."""

import copy
import subprocess
import sys

import pytest
import torch
import transformers
from tests.checkpointing import checkpoint_layers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import lln
from lln.errors import BackendUnavailableError, InvalidInputError, UnsupportedModelError
from lln.integrations import attend, own_attention
from lln.integrations.cache import LLNCache
from lln.integrations.convert import convert
from lln.integrations.settings import SAVED_AS
from lln.integrations.transformers import register
from lln.reference import lln_matrix

FIXED = {"statistics": "fixed", "alpha": 2.0, "beta": 2.0}
ENCODERS = ("roberta", "bert", "distilbert")
each_attention = pytest.mark.parametrize("attention", ["lln", "lln_diag"])
each_encoder = pytest.mark.parametrize("name", ENCODERS)


def calls_of(model, **inputs):
    """Every call of our attention during one forward pass."""
    calls = []
    with attend.observed(lambda call: calls.append(call)):
        model(**inputs)
    return calls


def change(found, expected):
    return (found - expected).abs().max().item()


# The contract


@each_attention
@each_encoder
def test_every_layer_runs_our_attention_once(tiny, text, attention, name):
    model = tiny(name, attention)
    assert len(calls_of(model, **text())) == 2


@each_attention
def test_layer_output_is_the_dense_formula(tiny, text, attention):
    """Strided queries, padding, heads of their own: against float64 matrices."""
    model = tiny("roberta", attention, FIXED | {"block_size": 4})
    inputs = text(12, padding=5)
    call = calls_of(model, **inputs)[0]
    assert call.query.stride() == (12 * 32, 8, 32, 1)
    query, key, value = (side.double() for side in (call.query, call.key, call.value))
    keep = inputs["attention_mask"].bool()[:, None, None, :]
    score = (2 * query).exp() @ (2 * key).exp().mT * keep
    expected = score / score.sum(-1, keepdim=True) @ value
    if attention == "lln_diag":
        place = torch.arange(12) // 4
        scores = query @ key.mT / 8**0.5
        near = (place[:, None] == place) & keep
        weights = scores.masked_fill(~near, -torch.inf).softmax(-1).nan_to_num()
        expected = 0.5 * expected + 0.5 * weights @ value
    found, weights = attend.forward(
        attention,
        call.module,
        call.query,
        call.key,
        call.value,
        call.mask,
        0.0,
        8**-0.5,
    )
    assert weights is None
    assert found.shape == (2, 12, 4, 8)
    assert found.is_contiguous()
    assert change(found, expected.transpose(1, 2)) < 1e-6


def test_grouped_queries_equal_repeated_keys(tiny, text):
    model = tiny("llama", "lln", FIXED)
    call = calls_of(model, **text())[0]
    assert call.query.shape[1] == 2 * call.key.shape[1]
    found = attend.attend(call)
    key, value = (side.repeat_interleave(2, 1) for side in (call.key, call.value))
    expected = lln.lln_attention(call.query, key, value, alpha=2.0, beta=2.0, is_causal=True)
    assert change(found, expected) < 1e-6


def test_scaling_of_the_model_is_honoured(tiny, text):
    """GPT-2 may scale its scores by the layer; matching and the diagonal part follow."""
    model = tiny("gpt2", "lln_diag", FIXED | {"block_size": 64}, scale_attn_weights=False)
    call = calls_of(model, **text())[0]
    assert call.module.scaling == 1.0
    raw = call.query / 8**0.5
    key_mask = call.mask
    soft = torch.nn.functional.scaled_dot_product_attention(
        raw, call.key, call.value, is_causal=True, scale=1.0
    )
    long = lln.lln_attention(
        call.query, call.key, call.value, alpha=2.0, beta=2.0, is_causal=True, key_mask=key_mask
    )
    assert change(attend.attend(call), 0.5 * long + 0.5 * soft) < 1e-6


def test_dropout_reaches_attention_in_training_only(tiny, text):
    model = tiny("roberta", "lln", hidden_dropout_prob=0.0)
    assert [call.dropout_p for call in calls_of(model, **text())] == [0.0, 0.0]
    model.train()
    assert [call.dropout_p for call in calls_of(model, **text())] == [0.1, 0.1]
    first, second = model(**text())[0], model(**text())[0]
    assert change(first, second) > 1e-5


@each_attention
@each_encoder
def test_padding_changes_nothing(tiny, text, attention, name):
    """Trap 1: without a mask function of our own, padding would be attended in silence."""
    model = tiny(name, attention)
    inputs = text(12, padding=5)
    padded = model(**inputs)[0][1, :7]
    alone = model(input_ids=inputs["input_ids"][1:, :7])[0][0]
    assert change(padded, alone) < 1e-6


@each_attention
def test_padding_changes_nothing_in_a_model_with_windows(tiny, text, attention):
    model = tiny("modernbert", attention)
    inputs = text(24, padding=9)
    padded = model(**inputs)[0][1, :15]
    alone = model(input_ids=inputs["input_ids"][1:, :15])[0][0]
    assert change(padded, alone) < 1e-6


@each_attention
def test_left_padding_changes_nothing_in_a_causal_lln_model(tiny, text, attention):
    # Blocks are counted from the first position, so their size must cover the sequence here.
    model = tiny("llama", attention, FIXED | {"block_size": 64})
    inputs = text(12, padding=5, side="left")
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    padded = model(**inputs, position_ids=positions)[0][1, 5:]
    alone = model(input_ids=inputs["input_ids"][1:, 5:])[0][0]
    assert change(padded, alone) < 1e-6


@each_attention
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_right_padding_changes_nothing_in_a_causal_model(tiny, text, attention, name):
    model = tiny(name, attention, FIXED | {"block_size": 4})
    inputs = text(12, padding=5)
    padded = model(**inputs)[0][1, :7]
    alone = model(input_ids=inputs["input_ids"][1:, :7])[0][0]
    assert change(padded, alone) < 1e-6


def test_batch_mates_change_nothing(tiny, text):
    model = tiny("roberta", "lln_diag")
    ids = text(12)["input_ids"]
    assert change(model(ids)[0][:1], model(ids[:1])[0]) < 1e-6


@each_attention
@pytest.mark.parametrize("name", ["vit", "deit"])
def test_vision_models(tiny, name, attention):
    model = tiny(name, attention)
    images = torch.randn(2, 3, 32, 32)
    calls = calls_of(model, pixel_values=images)
    assert len(calls) == 2
    out = model(pixel_values=images)[0]
    out.sum().backward()
    assert out.isfinite().all()
    assert change(model(pixel_values=images[:1])[0], out[:1]) < 1e-6


# Packed sequences


@each_attention
def test_packed_sequences_equal_separate_ones(tiny, text, attention):
    model = tiny("roberta", attention, {"block_size": 4})
    ids = text(17, batch=1)["input_ids"]
    bounds = torch.tensor([0, 6, 7, 17], dtype=torch.int32)
    pieces = [(0, 6), (6, 7), (7, 17)]
    # RoBERTa counts its positions from padding_idx + 1.
    places = torch.cat([torch.arange(1, end - start + 1) for start, end in pieces])[None]
    packed = model(ids, position_ids=places, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)[0]
    for start, end in pieces:
        alone = model(ids[:, start:end], position_ids=places[:, start:end])[0]
        assert change(packed[:, start:end], alone) < 1e-6


@each_attention
def test_sequences_packed_by_their_positions_equal_separate_ones(tiny, text, attention):
    model = tiny("llama", attention, FIXED | {"block_size": 4})
    ids = text(17, batch=2)["input_ids"]
    pieces = [(0, 6), (6, 7), (7, 17)]
    places = torch.cat([torch.arange(end - start) for start, end in pieces])[None]
    packed = model(ids, position_ids=places, use_cache=False)[0]
    for start, end in pieces:
        alone = model(ids[:, start:end], use_cache=False)[0]
        assert change(packed[:, start:end], alone) < 1e-6


@pytest.mark.parametrize("statistics", ["fixed", "running", "learned"])
@pytest.mark.parametrize("mix", [0.3, "gate", "scale", "heads", "ratio"])
def test_packed_sequences_in_a_converted_model(tiny, text, statistics, mix):
    model = tiny("roberta", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    convert(
        model,
        "lln_diag",
        calibrate=text(17),
        statistics=statistics,
        mix=mix,
        block_size=4,
        verbose=False,
    )
    for name, parameter in model.named_parameters():
        if "gate" in name or "scale" in name:
            torch.nn.init.normal_(parameter)
    if statistics == "running":
        model.train()
    ids = text(16, batch=1, seed=1)["input_ids"]
    places = torch.cat([torch.arange(1, 5), torch.arange(1, 13)])[None]
    bounds = torch.tensor([0, 4, 16])
    padded_ids, mask = torch.zeros(2, 12, dtype=torch.int64), torch.zeros(2, 12)
    padded_ids[0, :4], padded_ids[1] = ids[0, :4], ids[0, 4:]
    mask[0, :4], mask[1] = 1, 1
    padded_places = torch.arange(1, 13).expand(2, -1)
    other = copy.deepcopy(model)
    packed = model(ids, position_ids=places, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)[0][0]
    dense = other(padded_ids, attention_mask=mask, position_ids=padded_places)[0]
    assert change(packed, torch.cat([dense[0, :4], dense[1]])) < 1e-5
    for one, two in zip(model.buffers(), other.buffers(), strict=True):
        assert torch.allclose(one.float(), two.float(), rtol=1e-5)


@pytest.mark.parametrize("batch", [1, 2])
def test_packed_sequences_in_layers_left_softmax(tiny, text, batch):
    soft = tiny("roberta")
    model = copy.deepcopy(soft)
    convert(model, "lln_diag", layers=[], batch=text(), verbose=False)
    ids = text(9, batch=batch)["input_ids"]
    places = torch.cat([torch.arange(1, 4), torch.arange(1, 7)])[None].expand(batch, -1)
    bounds = torch.tensor([0, 3, 9, 12, 18][: 2 * batch + 1])
    packed = model(ids, position_ids=places, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)[0]
    for part in (slice(0, 3), slice(3, 9)):
        alone = soft(ids[:, part], position_ids=places[:, part])[0]
        assert change(packed[:, part], alone) < 1e-6


def test_packing_refuses_what_does_not_fit(tiny, text):
    model = tiny("roberta", "lln")
    ids = text(6, batch=1)["input_ids"]
    bounds = torch.tensor([0, 2, 6])
    with pytest.raises(InvalidInputError, match="attention_mask and cu_seq_lens_q"):
        model(ids, attention_mask=torch.tensor([[1, 1, 1, 1, 1, 0]]), cu_seq_lens_q=bounds)
    with pytest.raises(InvalidInputError, match="must be equal"):
        model(ids, cu_seq_lens_q=bounds, cu_seq_lens_k=torch.tensor([0, 6]))
    with pytest.raises(InvalidInputError, match="must be equal"):
        model(ids, cu_seq_lens_q=bounds, cu_seq_lens_k=torch.tensor([0, 3, 6]))
    model(ids, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds.int())
    with pytest.raises(InvalidInputError, match="without cu_seq_lens_q"):
        model(ids, cu_seq_lens_k=bounds)


# The twelve traps, in the order of their measurement


def test_trap_1_both_names_have_a_mask_function():
    register()
    for name in ("lln", "lln_diag"):
        assert name in ALL_ATTENTION_FUNCTIONS
        assert name in ALL_MASK_ATTENTION_FUNCTIONS


@pytest.mark.filterwarnings("ignore")
def test_trap_2_compiles_and_exports(tiny, text):
    model = tiny("roberta", "lln_diag", num_hidden_layers=1)
    inputs = text(150, padding=60)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert change(compiled(**inputs)[0], model(**inputs)[0]) < 1e-6
    length = {1: torch.export.Dim.DYNAMIC}
    shapes = {"input_ids": length, "attention_mask": length}
    exported = torch.export.export(model, (), inputs, dynamic_shapes=shapes).module()
    for tokens in (100, 300):
        other = text(tokens, padding=31)
        assert change(exported(**other)[0], model(**other)[0]) < 1e-6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["bert", "modernbert", "llama", "gpt2"])
def test_trap_2_other_models_compile_and_export(tiny, text, name):
    lln_settings = FIXED
    model = tiny(name, "lln_diag", lln_settings)
    inputs = text(300, padding=60)
    options = {} if "bert" in name else {"use_cache": False}
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    valid = inputs["attention_mask"].bool()
    found, expected = compiled(**inputs, **options)[0], model(**inputs, **options)[0]
    assert change(found[valid], expected[valid]) < 1e-5
    length = {1: torch.export.Dim.DYNAMIC}
    shapes = {"input_ids": length, "attention_mask": length} | dict.fromkeys(options)
    exported = torch.export.export(model, (), {**inputs, **options}, dynamic_shapes=shapes).module()
    other = text(190)
    assert change(exported(**other, **options)[0], model(**other, **options)[0]) < 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trap_2_a_vision_model_compiles_and_exports(tiny):
    model = tiny("vit", "lln_diag")
    size = model.config.image_size
    images = torch.randn(2, 3, size, size)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert change(compiled(images)[0], model(images)[0]) < 1e-6
    exported = torch.export.export(model, (images,)).module()
    others = torch.randn(2, 3, size, size)
    assert change(exported(others)[0], model(others)[0]) < 1e-6


def test_trap_2_a_trace_without_a_mask_is_refused(tiny, text):
    """A trace of Llama without a mask looks packed whatever the positions are."""
    model = tiny("llama", "lln", FIXED, num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="2-D attention_mask"):
        compiled(text()["input_ids"], use_cache=False)


def test_trap_3_a_model_that_ignores_the_interface_is_refused(tiny, text):
    model = tiny("deberta")
    before = model(**text())[0]
    with pytest.raises(UnsupportedModelError, match="DebertaV2Model"):
        convert(model, "lln_diag", batch=text(), verbose=False)
    assert model.config._attn_implementation != "lln_diag"
    assert change(model(**text())[0], before) == 0


def test_trap_3_without_the_source_check_the_dry_run_still_refuses(tiny, text, monkeypatch):
    model = tiny("deberta")
    monkeypatch.setattr(own_attention, "keeps_own_attention", lambda kind: False)
    monkeypatch.setattr(
        type(model), "_can_set_attn_implementation", classmethod(lambda cls: True), raising=True
    )
    with pytest.raises(UnsupportedModelError, match="without one call"):
        convert(model, "lln_diag", batch=text(), verbose=False)


@each_attention
def test_trap_4_a_saved_model_comes_back_with_its_attention(tiny, text, tmp_path, attention):
    model = tiny("roberta", attention)
    model.save_pretrained(tmp_path)
    for auto in (transformers.AutoModel, transformers.RobertaModel):
        again = auto.from_pretrained(tmp_path).eval()
        assert again.config._attn_implementation == attention
        assert change(again(**text())[0], model(**text())[0]) == 0
    again.save_pretrained(tmp_path / "twice")
    twice = transformers.AutoModel.from_pretrained(tmp_path / "twice")
    assert twice.config._attn_implementation == attention
    chosen = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert chosen.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("name", "auto"),
    [
        ("bert", "AutoModel"),
        ("modernbert", "AutoModel"),
        ("vit", "AutoModel"),
        ("llama", "AutoModelForCausalLM"),
        ("gpt2", "AutoModelForCausalLM"),
    ],
)
def test_trap_4_every_kind_of_model_comes_back(tiny, text, tmp_path, name, auto):
    model = tiny(name, "lln_diag", FIXED | {"block_size": 4})
    model.save_pretrained(tmp_path)
    again = getattr(transformers, auto).from_pretrained(tmp_path).eval()
    assert type(again) is type(model)
    assert again.config._attn_implementation == "lln_diag"
    assert again.config.lln == model.config.lln
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32)} if name == "vit" else text()
    assert torch.equal(again(**inputs)[0], model(**inputs)[0])
    soft = tiny(name)
    assert change(soft(**inputs)[0], model(**inputs)[0]) > 1e-6


def test_trap_4_loading_without_us_fails_loudly(tiny, tmp_path):
    tiny("roberta", "lln").save_pretrained(tmp_path)
    script = f"import transformers; transformers.AutoModel.from_pretrained({str(tmp_path)!r})"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode != 0
    assert "ValueError" in run.stderr
    assert "lln" in run.stderr


def test_trap_5_settings_are_saved_and_restored(tiny, tmp_path):
    settings = {"block_size": 4, "matching": "entropy", "mix": 0.25}
    tiny("roberta", "lln_diag", settings).save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path)
    assert again.config.lln == settings


def test_trap_6_attention_weights_on_request(tiny, text):
    model = tiny("roberta", "lln", FIXED)
    assert model(**text()).attentions is None
    call = calls_of(model, **text())[0]
    attentions = model(**text(), output_attentions=True).attentions
    expected = lln_matrix(call.query.double(), call.key.double(), 2.0, 2.0)
    assert change(attentions[0], expected) < 1e-6
    with pytest.raises(ValueError, match="output_attentions"):
        model.config.output_attentions = True


def test_trap_6_weights_of_a_converted_model_add_up_to_its_output(tiny, text):
    model = tiny("roberta", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    inputs = text(12, padding=4)
    convert(model, "lln_diag", calibrate=inputs, statistics="running", mix="gate", verbose=False)
    model.train()
    calls = calls_of(copy.deepcopy(model), **inputs)
    weights = model(**inputs, output_attentions=True).attentions[0]
    valid = inputs["attention_mask"].bool()
    assert change(weights.sum(-1).transpose(1, 2)[valid], torch.ones(20, 4)) < 1e-6
    assert weights[1, :, :, 8:].abs().max() == 0
    # Looking at the weights is no second batch.
    heads = model.encoder.layer[0].attention.self.lln
    assert heads.statistics.updates == 2
    assert change(weights @ calls[0].value, attend.attend(calls[0])) < 1e-5
    convert(model, "lln_diag", calibrate=inputs, mix="ratio", verbose=False)
    with pytest.raises(InvalidInputError, match="mix='ratio'"):
        model(**inputs, output_attentions=True)


def test_trap_6_weights_while_generating(tiny, text):
    """A cache of fixed size has no keys to weigh; Hugging Face would return empty tuples."""
    model = tiny("llama", "lln", FIXED)
    options = {"max_new_tokens": 2, "do_sample": False, "output_attentions": True}
    with pytest.raises(InvalidInputError, match=r"LLNCache, .* pass use_cache=False"):
        model.generate(**text(6), **options, return_dict_in_generate=True)
    found = model.generate(**text(6), **options, return_dict_in_generate=True, use_cache=False)
    expected = model(found.sequences[:, :-1], output_attentions=True, use_cache=False).attentions
    for layer, weights in zip(found.attentions[-1], expected, strict=True):
        assert change(layer, weights) < 1e-6


@pytest.mark.parametrize("name", ["roberta", "mistral"])
def test_trap_6_layers_that_keep_softmax_have_weights(tiny, text, name):
    soft = tiny(name, "eager")
    ours = tiny(name)
    convert(ours, "lln", layers=[], batch=text())
    inputs = text(12, padding=4) | ({"use_cache": False} if name == "mistral" else {})
    valid = inputs["attention_mask"].bool()
    found, expected = (model(**inputs, output_attentions=True).attentions for model in (ours, soft))
    for one, two in zip(found, expected, strict=True):
        assert change(one.transpose(1, 2)[valid], two.transpose(1, 2)[valid]) < 1e-6


def test_trap_7_generate_keeps_a_state_of_fixed_size(tiny, text):
    """Hugging Face's own cache would hand over ever more keys."""
    model = tiny("llama", "lln", FIXED)
    lengths = []
    with attend.observed(lambda call: lengths.append(call.key.shape[2])):
        model.generate(**text(10), max_new_tokens=4, do_sample=False)
    assert lengths == [10, 10, 1, 1, 1, 1, 1, 1]


def test_trap_7_another_cache_works_and_warns_what_it_costs(tiny, text):
    model = tiny("llama", "lln_diag", FIXED | {"block_size": 4})
    inputs = text(10)
    cache = transformers.DynamicCache(config=model.config)
    with pytest.warns(UserWarning, match="LLNCache"):
        out = model.generate(**inputs, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert torch.equal(out, model.generate(**inputs, max_new_tokens=6, do_sample=False))


def test_a_mistyped_attention_is_told_which_was_meant(tiny):
    with pytest.raises(InvalidInputError, match=r"'lln_dia' does not exist.*mean 'lln_diag'"):
        tiny("roberta", "lln_dia")
    model = tiny("roberta")
    with pytest.raises(InvalidInputError, match="mean 'lln_keys'"):
        model.set_attn_implementation("LLN-keys")
    with pytest.raises(ValueError, match="attn_implementation") as raised:
        tiny("roberta", "something")
    assert not isinstance(raised.value, InvalidInputError)


def test_trap_8_our_names_start_no_dispatch_of_transformers():
    register()
    for name in (*SAVED_AS, *SAVED_AS.values()):
        assert not any(word in name for word in ("sdpa", "flash", "flex", "/", "|"))


def test_trap_9_a_model_whose_source_cannot_be_read_is_refused(tiny, text, monkeypatch):
    model = tiny("roberta")
    monkeypatch.setattr(
        type(model), "_can_set_attn_implementation", classmethod(lambda cls: False), raising=True
    )
    with pytest.raises(UnsupportedModelError, match="source cannot be read"):
        convert(model, "lln_diag", batch=text(), verbose=False)


@pytest.mark.parametrize("option", [{"mix": "gate"}, {"statistics": "running"}])
def test_trap_10_learned_settings_without_a_module_are_refused(tiny, text, option):
    with pytest.raises(InvalidInputError, match="convert"):
        tiny("roberta", "lln_diag", option)
    model = tiny("roberta", "lln_diag")
    model.config.lln = option
    with pytest.raises(InvalidInputError, match="convert"):
        model(**text())


@pytest.mark.parametrize("reentrant", [False, True])
def test_trap_11_gradient_checkpointing_updates_statistics_once(tiny, text, reentrant):
    def gradients(checkpointed):
        model = tiny("roberta", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        convert(model, "lln_diag", calibrate=text(), statistics="running", verbose=False)
        if checkpointed:
            checkpoint_layers(model, reentrant)
        model.train()
        embeds = model.embeddings(text(20)["input_ids"]).detach().requires_grad_()
        for _ in range(2):
            model(inputs_embeds=embeds)[0].square().sum().backward()
        state = {name: buffer for name, buffer in model.named_buffers() if "lln" in name}
        return embeds.grad, state

    plain, state = gradients(False)
    found, checkpointed = gradients(True)
    assert change(found, plain) < 1e-5 * plain.abs().max()
    assert state["encoder.layer.0.attention.self.lln.statistics.updates"] == 3
    for name, buffer in state.items():
        if "last_" not in name:
            assert torch.equal(checkpointed[name], buffer), name


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@each_attention
def test_trap_12_autocast(tiny, text, attention):
    model = tiny("roberta", attention)
    exact = model(**text())[0]
    with torch.autocast("cpu", torch.bfloat16):
        out = model(**text())[0]
        calls = calls_of(model, **text())
        found = attend.attend(calls[0])
    out.float().sum().backward()
    assert found.dtype == torch.bfloat16
    assert change(out, exact) < 0.05
    wide = attend.attend(
        attend.replace(
            calls[0],
            query=calls[0].query.double(),
            key=calls[0].key.double(),
            value=calls[0].value.double(),
        )
    )
    # Inside, everything is float32: only the result is rounded.
    assert change(found.double(), wide) < 0.005 * wide.abs().max()


# Refusals


def test_position_bias_is_refused(tiny, text):
    model = tiny("t5", "lln")
    with pytest.raises(UnsupportedModelError, match="position_bias"):
        model(**text())


@pytest.mark.parametrize("name", ["softcap", "s_aux", "head_mask", "cache"])
def test_what_changes_scores_one_by_one_is_refused(tiny, text, name):
    model = tiny("roberta", "lln")
    with pytest.raises(UnsupportedModelError, match=name):
        model(**text(), **{name: 30.0})


def test_masks_of_pairs_are_refused(tiny, text):
    model = tiny("roberta", "lln")
    with pytest.raises(InvalidInputError, match="4-D"):
        model(text()["input_ids"], attention_mask=torch.ones(2, 1, 12, 12))


def test_layers_with_windows_equal_transformers_own(tiny, text):
    soft, ours = tiny("modernbert"), tiny("modernbert", "lln")
    for model in (soft, ours):
        model.layers = model.layers[1:]
        model.config.layer_types = model.config.layer_types[1:]
    inputs = text(30, padding=7)
    valid = inputs["attention_mask"].bool()
    assert change(soft(**inputs)[0][valid], ours(**inputs)[0][valid]) < 1e-6


def test_causal_windows_equal_transformers_own(tiny, text):
    soft, ours = tiny("mistral"), tiny("mistral", "lln")
    inputs = text(30, padding=7, side="left")
    valid = inputs["attention_mask"].bool()
    assert change(soft(**inputs)[0][valid], ours(**inputs)[0][valid]) < 1e-5
    out = ours.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert torch.equal(out, soft.generate(**inputs, max_new_tokens=8, do_sample=False))


def test_windows_that_continue_a_cache_of_all_keys(tiny, text):
    soft, ours = tiny("mistral"), tiny("mistral", "lln")
    ids, cache = text(30)["input_ids"], LLNCache(ours)
    parts = [ours(part, past_key_values=cache)[0] for part in ids.split([21, 1, 8], dim=1)]
    assert change(soft(ids)[0], torch.cat(parts, dim=1)) < 1e-5


def test_causal_statistics_of_the_sequence_are_refused(tiny, text):
    model = tiny("llama", "lln")
    with pytest.raises(lln.CausalStatisticsError, match="calibrate=batch"):
        model(**text())
    with pytest.raises(lln.CausalStatisticsError, match="calibrate=batch"):
        model.generate(**text(), max_new_tokens=2)
    with pytest.raises(lln.CausalStatisticsError, match="calibrate=batch"):
        model(text()["input_ids"], position_ids=torch.arange(6).repeat(2, 2))


def test_static_caches_are_refused(tiny, text):
    model = tiny("llama", "lln", FIXED)
    with pytest.raises(InvalidInputError, match="static cache"):
        model.generate(**text(), max_new_tokens=2, cache_implementation="static")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"blocksize": 4}, "unknown settings blocksize"),
        ({"format": 7}, "format 7"),
        ({"statistics": "none"}, "statistics"),
        ({"statistics": "fixed"}, "alpha"),
        ({"mix": 2.0}, "mix"),
        ({"mix": "both"}, "mix"),
        ({"block_size": 0}, "block_size"),
        ("lln", "dictionary"),
    ],
)
def test_settings_are_checked(tiny, text, settings, message):
    with pytest.raises(InvalidInputError, match=message):
        tiny("roberta", "lln", settings)
    model = tiny("roberta", "lln")
    model.config.lln = settings
    with pytest.raises(InvalidInputError, match=message):
        model(**text())


IMPORTS = """
import sys
import lln

missing = {"transformers", "safetensors", "tokenizers", "huggingface_hub", "accelerate"}
for folder in ("", *sys.argv[1:]):
    if folder:
        sys.path.insert(0, folder)
    for name in MODULES:
        for other in list(sys.modules):
            if other.split(".")[0] in missing or other.startswith(("lln.integrations", "lln_lab")):
                del sys.modules[other]
        if not folder:
            sys.modules.update(dict.fromkeys(missing))
        try:
            __import__(name)
        except Exception as error:
            print(type(error).__name__, error)
"""


def check_what_to_install(tmp_path, modules):
    """Not there, with all that comes with it; years old; installed, but broken."""
    for folder, source in {
        "old": "__version__ = '4.57.1'",
        "broken": "raise ImportError('hub>=1.5,<2 is required.\\nTry this or that')",
    }.items():
        (tmp_path / folder / "transformers").mkdir(parents=True)
        (tmp_path / folder / "transformers" / "__init__.py").write_text(source)
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            f"MODULES = {modules}\n{IMPORTS}",
            str(tmp_path / "old"),
            str(tmp_path / "broken"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    sentences = (
        "Hugging Face models need transformers; pip install 'lln[hf]'.",
        "lln needs transformers 5.17 or newer, found 4.57.1; pip install 'lln[hf]'.",
        "transformers is installed but cannot be imported: hub>=1.5,<2 is required; "
        "pip install --upgrade 'lln[hf]'.",
    )
    expected = [f"BackendUnavailableError {sentence}" for sentence in sentences for _ in modules]
    assert run.stdout.splitlines() == expected


def test_without_a_transformers_that_works_a_sentence_says_what_to_install(tmp_path):
    names = ["transformers", "convert", "cache", "folders", "masks"]
    check_what_to_install(tmp_path, [f"lln.integrations.{name}" for name in names])


def test_a_transformers_that_is_a_little_too_old_is_refused(monkeypatch):
    from lln.integrations import transformers as ours

    monkeypatch.setattr(ours, "_registered", False)
    # What the module itself looks at, whatever else was imported since.
    monkeypatch.setattr(ours.transformers, "__version__", "5.16.3")
    with pytest.raises(BackendUnavailableError, match=r"5\.17 or newer, found 5\.16\.3; pip"):
        ours.register()
