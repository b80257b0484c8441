"""lln inspect: from a model on disk to a page and its numbers."""

import json
import math
import re
from html.parser import HTMLParser

import pytest
import torch
from lab.tests.commands import app
from lab.tests.work import work
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
    ViTConfig,
    ViTModel,
)
from typer.testing import CliRunner

from lln.errors import BackendUnavailableError, InvalidInputError
from lln.instruments import capture, entropy
from lln.integrations.settings import Settings
from lln_lab.inspection import run_inspect
from lln_lab.inspection.choice import choose_heads, parse_heads
from lln_lab.inspection.findings import findings
from lln_lab.inspection.imitation import imitate
from lln_lab.inspection.key_masses import key_masses
from lln_lab.inspection.local_model import load_local_model
from lln_lab.inspection.page import render_json, render_page
from lln_lab.inspection.page_masses import page_masses
from lln_lab.inspection.saved import read_study
from lln_lab.inspection.study import INSTRUMENTS, StudiedLayer, Study, study_layer
from lln_lab.inspection.text import read_text

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 32,
}


def save_tokenizer(folder, framed=True):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{index}" for index in range(60))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    if framed:
        tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]"
    ).save_pretrained(folder)


def save_model(folder, model_class=BertModel, config_class=BertConfig, framed=True, **options):
    torch.manual_seed(0)
    model = model_class(config_class(vocab_size=64, **SIZES | options))
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if re.search(r"(query|key|q_proj|k_proj)\.weight$", path):
                parameter.mul_(25)
    model.save_pretrained(folder)
    save_tokenizer(folder, framed)
    return model


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "bert"
    save_model(folder, max_position_embeddings=40)
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 60, (400,), generator=generator).tolist()
    path.write_text(" ".join(f"w{number}" for number in numbers))
    return path


@pytest.fixture(autouse=True)
def pages_without_charts(request, monkeypatch):
    """Drawing takes seconds; two tests here, and test_page.py, look at pages with charts."""
    drawn = ("test_page_and_numbers", "test_bad_layers_get_a_sentence_and_the_rest_a_report")
    if request.node.originalname not in drawn:
        monkeypatch.setattr("lln_lab.inspection.page.inline_svg", lambda chart: chart.label)


class Reader(HTMLParser):
    """Checks that tags close in order, and keeps the text."""

    VOID = frozenset({"meta", "br", "img"})

    def __init__(self, page):
        super().__init__()
        self.open, self.text, self.tags = [], "", []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            # Everything must be inside the file.
            assert name not in ("src", "href") or (value or "").startswith(("data:", "#"))

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_page_and_numbers(bert, text, tmp_path):
    lines = []
    page = run_inspect(str(bert), tmp_path / "out", text=text, tokens=24, echo=lines.append)
    assert page == tmp_path / "out" / "lln-inspect.html"
    reader = Reader(page.read_text("utf-8"))
    assert "script" not in reader.tags
    assert page.read_text("utf-8").count('<svg class="chart"') == page.read_text("utf-8").count(
        "<figcaption>"
    )
    assert reader.tags.count("figure") >= 24
    for title in ("How concentrated", "Is log P normal", "Measured against theory", "Gaussian"):
        assert title in reader.text
    assert "refresh" not in page.read_text("utf-8")
    numbers = json.loads(page.with_suffix(".json").read_text("utf-8"))
    assert numbers["complete"]
    assert numbers["tokens"] == 24
    assert numbers["architecture"] == "BertModel"
    assert [layer["name"] for layer in numbers["layers"]] == [
        f"encoder.layer.{layer}.attention.self" for layer in range(3)
    ]
    for grid in numbers["values"].values():
        assert [len(row) for row in grid] == [4, 4, 4]
    assert str(tmp_path) not in page.with_suffix(".json").read_text("utf-8")
    assert lines[1:-1] == list(numbers["findings"].values())
    assert lines[-1] == f"The page: {page}"
    assert 1 <= len(numbers["chosen_heads"]) <= 4


def test_values_are_the_models_own(bert, text, tmp_path):
    run_inspect(str(bert), tmp_path, text=text, tokens=24)
    values = json.loads((tmp_path / "lln-inspect.json").read_text())["values"]
    local = load_local_model(str(bert))
    ids = local.encode(text.read_text(), 24, 1)
    assert ids.shape == (1, 24)
    assert (ids[0, 0], ids[0, -1]) == (2, 3)
    local.model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = local.model(input_ids=ids, output_attentions=True).attentions
    for layer, matrix in enumerate(weights):
        p = matrix[0].double()
        own = -(p * p.log2()).sum(-1).mean(-1)
        assert values["entropy"][layer] == pytest.approx(own.tolist(), abs=1e-4)
        log_p = p.log()
        inside = log_p.var(-1, correction=0).mean(-1)
        assert values["log_normality.row_variance"][layer] == pytest.approx(
            inside.tolist(), rel=1e-3
        )
        # Inside a row log P is the score less a constant.
        assert values["score_variance.within_row"][layer] == pytest.approx(
            inside.tolist(), rel=1e-3
        )
        predicted = -math.log(24) - inside / 2
        assert values["theory.mean"][layer] == pytest.approx(predicted.tolist(), rel=1e-3)


def test_masses_of_block_keys_and_slots(text, tmp_path):
    save_model(tmp_path / "model", max_position_embeddings=100, num_hidden_layers=1)
    lines = []
    run_inspect(str(tmp_path / "model"), tmp_path, text=text, tokens=100, echo=lines.append)
    local = load_local_model(str(tmp_path / "model"))
    found = []
    with capture(local.model, instruments=(), on_call=found.append):
        local.run(local.encode(text.read_text(), 100, 1))
    masses = key_masses(found[0].query, found[0].key, keys=(16, 32, 64, 128, 256))
    values = json.loads((tmp_path / "lln-inspect.json").read_text())["values"]
    assert values["mass.block"][0] == pytest.approx(masses.block[0].tolist(), rel=1e-5)
    for place, number in enumerate(masses.keys.tolist()):
        for name, side in (("keys", masses.chosen), ("rest", masses.rest)):
            own = side[0, :, place].tolist()
            assert values[f"mass.{name}_{number}"][0] == pytest.approx(own, rel=1e-5, abs=1e-9)
    (table,) = [line for line in lines if "K = 256, slots" in line]
    assert len(table.splitlines()) == 2 + 4
    assert any("block of 64 tokens holds" in line for line in lines)
    page = (tmp_path / "lln-inspect.html").read_text("utf-8")
    assert "6. Which heads need exact keys?</h2>" in page
    assert "<summary>Shares of every head</summary>" in page


@pytest.mark.parametrize(
    ("model_class", "config_class", "form"),
    [
        (LlamaModel, LlamaConfig, {"window": 10, "sinks": 2}),
        (LlamaModel, LlamaConfig, {"window": 10, "page_size": 8}),
        (BertModel, BertConfig, {"window": 10}),
    ],
    ids=["decoder", "sinks left out", "encoder"],
)
def test_masses_of_window_sinks_and_pages(model_class, config_class, form, text, tmp_path):
    is_causal = model_class is LlamaModel
    own = {"num_key_value_heads": 2} if is_causal else {}
    own |= {"max_position_embeddings": 100, "num_hidden_layers": 1}
    save_model(tmp_path / "model", model_class, config_class, framed=False, **own)
    lines, options = [], {"text": text, "tokens": 100, "pages": 2}
    run_inspect(str(tmp_path / "model"), tmp_path, **options, **form, echo=lines.append)
    local = load_local_model(str(tmp_path / "model"))
    found = []
    with capture(local.model, instruments=(), on_call=found.append):
        local.run(local.encode(text.read_text(), 100, 1))
    sizes = {"page_size": 16, "sinks": 16 if is_causal else 0} | form
    sides = found[0].query, found[0].key
    masses = page_masses(*sides, is_causal=is_causal, pages=(1, 2, 4, 8), **sizes)
    numbers = json.loads((tmp_path / "lln-inspect.json").read_text())
    assert numbers["layers"][0]["pages"] == {"pages": 2} | sizes
    values = numbers["values"]
    for name in ("window", "sinks"):
        own = getattr(masses, name)[0].tolist()
        assert values[f"mass.{name}"][0] == pytest.approx(own, rel=1e-5)
    for place, number in enumerate((1, 2, 4, 8)):
        for name, side in (("pages", masses.chosen), ("unseen", masses.rest)):
            own = side[0, :, place].tolist()
            assert values[f"mass.{name}_{number}"][0] == pytest.approx(own, rel=1e-5, abs=1e-9)
    (table,) = [line for line in lines if "P = 8, rest" in line]
    assert len(table.splitlines()) == 2 + 4
    assert ("sinks" in table) == is_causal
    assert any("chosen pages (10 tokens" in line for line in lines)
    page = (tmp_path / "lln-inspect.html").read_text("utf-8")
    assert "7. Would pages do, and how many?</h2>" in page
    again, _ = read_study(tmp_path / "lln-inspect.json")
    assert again.layers[0].pages == numbers["layers"][0]["pages"]


def seen_call(kind="softmax", causal=False, nan_head=None):
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 3, 40, 16) * 1.3
    if nan_head is not None:
        query[:, nan_head, 5] = torch.nan

    class Model(torch.nn.Module):
        def forward(self):
            attend = torch.nn.functional.scaled_dot_product_attention
            return attend(query, key, key, is_causal=causal)

    found = []
    model = Model()
    with capture(model, instruments=INSTRUMENTS, on_call=found.append):
        model()
    return found[0]


@pytest.mark.parametrize("causal", [False, True])
def test_imitation_has_the_heads_entropy_and_its_own_distance(causal):
    seen = seen_call(causal=causal)
    found = imitate(seen)
    target = seen.values["entropy"]
    torch.testing.assert_close(found.entropy, target, rtol=0, atol=0.05)
    alpha, beta = (side[..., None, None] for side in (found.alpha, found.beta))
    # Dense, from the definitions.
    query, key = seen.query.double(), seen.key.double()
    keep = torch.ones(40, 40).tril() > 0 if causal else torch.ones(40, 40) > 0
    scores = (query @ key.mT / 4).masked_fill(~keep, -torch.inf)
    softmax = scores.softmax(-1)
    kernel = ((alpha * query).exp() @ (beta * key).exp().mT).masked_fill(~keep, 0.0)
    lln = kernel / kernel.sum(-1, keepdim=True)
    even = keep.double() / keep.sum(-1, keepdim=True)
    for value, other in ((found.distance, lln), (found.even_distance, even)):
        expected = (softmax - other).abs().sum(-1).mean(-1) / 2
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-7)
    gap = 1 - torch.linalg.eigvals(lln).abs().sort(-1, descending=True).values[..., 1]
    torch.testing.assert_close(found.spectral_gap, gap, rtol=0, atol=1e-5)
    # The histogram counts what lies within five standard deviations.
    log_p = softmax[:, :, keep].log()
    standard = (log_p - log_p.mean(-1, keepdim=True)) / log_p.std(-1, correction=0, keepdim=True)
    expected = torch.stack([torch.histc(head, 60, -5, 5) for head in standard[0]])
    counted = found.softmax_histogram[0] * keep.sum()
    # Entries on an edge may fall on either side of it.
    assert (counted - expected).abs().sum() <= 4
    if causal:
        assert found.formula_entropy.isnan().all()
    else:
        assert (found.formula_entropy - target).abs().max() < 1


def test_a_nan_head_costs_itself_only():
    layer = study_layer(seen_call(nan_head=1))
    assert layer.problem == "not measured: queries hold NaN or infinity in 1 of 3 heads"
    for name in ("entropy", "lln.entropy", "lln.alpha", "lln.distance", "gaussianity.key_norms"):
        assert [math.isnan(value) for value in layer.values[name]] == [False, True, False]


def test_study_of_a_layer_agrees_with_the_instruments():
    seen = seen_call()
    layer = study_layer(seen)
    assert layer.values["entropy"] == pytest.approx(entropy(seen.query, seen.key)[0].tolist())
    ratio = [
        1 - a / b
        for a, b in zip(
            layer.values["theory.variance"], layer.values["score_variance.within_row"], strict=True
        )
    ]
    assert layer.values["theory.cross_share"] == pytest.approx(ratio)
    assert len(layer.shapes) == 3
    assert sum(layer.shapes[0].softmax_histogram) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("model_class", "config_class", "options"),
    [
        (LlamaModel, LlamaConfig, {"num_key_value_heads": 2}),
        (RobertaModel, RobertaConfig, {"max_position_embeddings": 20, "pad_token_id": 1}),
        (MistralModel, MistralConfig, {"num_key_value_heads": 2, "sliding_window": 5}),
    ],
    ids=["llama", "roberta", "mistral"],
)
def test_other_models(model_class, config_class, options, text, tmp_path):
    save_model(tmp_path / "model", model_class, config_class, framed=False, **options)
    lines = []
    page = run_inspect(str(tmp_path / "model"), tmp_path, text=text, tokens=30, echo=lines.append)
    numbers = json.loads(page.with_suffix(".json").read_text())
    assert len(numbers["layers"]) == 3
    assert not any(layer["problem"] for layer in numbers["layers"])
    if model_class is RobertaModel:
        assert numbers["tokens"] == 18
        assert "takes 18 tokens at most" in lines[0]
    if model_class is LlamaModel:
        assert all(layer["is_causal"] for layer in numbers["layers"])
        assert numbers["values"]["lln.entropy"][0][0] is not None
    if model_class is MistralModel:
        assert "mask over pairs" in numbers["layers"][0]["no_lln_because"]
        assert numbers["values"]["entropy"][0][0] is not None
        assert "lln.entropy" not in numbers["values"]
    Reader(page.read_text("utf-8"))


def test_bad_layers_get_a_sentence_and_the_rest_a_report(text, tmp_path):
    model = save_model(tmp_path / "model")
    with torch.no_grad():
        model.encoder.layer[1].attention.self.key.weight[0] = torch.nan
    model.save_pretrained(tmp_path / "model")
    lines = []
    page = run_inspect(str(tmp_path / "model"), tmp_path, text=text, tokens=20, echo=lines.append)
    numbers = json.loads(page.with_suffix(".json").read_text())
    problems = [layer["problem"] for layer in numbers["layers"]]
    assert problems[0] == ""
    assert "keys hold NaN or infinity in 1 of 4 heads" in problems[1]
    assert "NaN or infinity in 4 of 4 heads" in problems[2]
    assert numbers["values"]["entropy"][1][0] is None
    assert numbers["values"]["entropy"][1][1] is not None
    assert "Not everything could be measured" in Reader(page.read_text("utf-8")).text
    assert any(line.startswith("Layer 1 (encoder.layer.1") for line in lines)


def test_medians_over_samples(bert, text, tmp_path):
    run_inspect(str(bert), tmp_path, text=text, tokens=16, samples=3)
    numbers = json.loads((tmp_path / "lln-inspect.json").read_text())
    assert numbers["samples"] == 3
    local = load_local_model(str(bert))
    ids = local.encode(text.read_text(), 16, 3)
    assert ids.shape == (3, 16)
    assert len({tuple(row) for row in ids.tolist()}) == 3
    with capture(local.model, instruments=("entropy",)) as seen:
        local.run(ids)
    expected = seen.calls[0].values["entropy"].median(0).values
    assert numbers["values"]["entropy"][0] == pytest.approx(expected.tolist())


def test_an_interrupt_leaves_a_valid_page(bert, text, tmp_path, monkeypatch):
    from lln_lab.inspection import command

    original, calls = command.study_layer, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(command, "study_layer", interrupted)
    lines = []
    with pytest.raises(KeyboardInterrupt):
        run_inspect(str(bert), tmp_path, text=text, tokens=16, echo=lines.append)
    numbers = json.loads((tmp_path / "lln-inspect.json").read_text())
    assert not numbers["complete"]
    assert len(numbers["layers"]) == 1
    reader = Reader((tmp_path / "lln-inspect.html").read_text("utf-8"))
    assert "The run was stopped. 2 of 3 layers to go." in reader.text
    assert lines[-1].startswith("Stopped.")


def test_heads_to_show(bert, text, tmp_path):
    run_inspect(str(bert), tmp_path, text=text, tokens=16, heads="2.1, 0.3")
    numbers = json.loads((tmp_path / "lln-inspect.json").read_text())
    assert [(h["layer"], h["head"]) for h in numbers["chosen_heads"]] == [(2, 1), (0, 3)]
    assert parse_heads("1.2,3:4") == [(1, 2), (3, 4)]
    assert parse_heads(None) is None
    with pytest.raises(InvalidInputError, match=r"--heads takes LAYER\.HEAD .*, got 'five'"):
        parse_heads("five")
    with pytest.raises(InvalidInputError, match=r"--heads 7\.0 does not exist: layers are 0 to 2"):
        run_inspect(str(bert), tmp_path, text=text, tokens=16, heads="7.0")
    study = Study("m", "M", "t", 8, 1, [StudiedLayer("a", "softmax", 2, 4, 8, 8, False)])
    with pytest.raises(InvalidInputError, match=r"heads of layer 0 are 0 to 1"):
        choose_heads(study, [(0, 2)])


def test_refusals(bert, text, tmp_path):
    def inspect(model=str(bert), **options):
        run_inspect(model, tmp_path / "out", **{"text": text, "tokens": 16} | options)

    with pytest.raises(InvalidInputError, match="--tokens must be an integer of at least 8, got 7"):
        inspect(tokens=7)
    for name, least in (("pages", 1), ("page_size", 1), ("window", 0), ("sinks", 0)):
        option = "--" + name.replace("_", "-")
        with pytest.raises(
            InvalidInputError, match=f"{option} must be .* at least {least}, got -1"
        ):
            inspect(**{name: -1})
    with pytest.raises(InvalidInputError, match="does not exist; name a folder"):
        inspect(str(tmp_path / "nowhere"))
    with pytest.raises(InvalidInputError, match="no model in it"):
        inspect(str(tmp_path))
    with pytest.raises(InvalidInputError, match="is a file"):
        inspect(str(text))
    with pytest.raises(InvalidInputError, match=r"downloads nothing; .* `hf download some/name`"):
        inspect("some/name")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        inspect(text=tmp_path / "nothing.txt")
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(InvalidInputError, match="holds no text"):
        inspect(text=tmp_path / "empty.txt")
    with pytest.raises(InvalidInputError, match=r"--out .* cannot be written: Not a directory"):
        run_inspect(str(bert), text / "below", text=text)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(InvalidInputError, match="cannot be loaded"):
        inspect(str(broken))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (None, {"text": "nothing.txt"}),
        ("some/name", {}),
        (None, {"heads": "7.0"}),
        (None, {"heads": "0.4"}),
    ],
    ids=["text", "model", "layer", "head"],
)
def test_a_refusal_leaves_nothing_behind(bert, text, tmp_path, model, options):
    before = sorted(tmp_path.rglob("*"))
    given = {"text": text, "tokens": 16} | options
    given["text"] = tmp_path / given["text"]
    with pytest.raises(InvalidInputError):
        run_inspect(model or str(bert), tmp_path / "deep" / "out", **given)
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "mine").mkdir()
    with pytest.raises(InvalidInputError):
        run_inspect(model or str(bert), tmp_path / "mine", **given)
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "mine"])


def test_a_failure_between_layers_leaves_what_was_measured(bert, text, tmp_path, monkeypatch):
    from lln_lab.inspection import command

    original, calls = command.study_layer, []

    def failing(*args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no memory left")
        return original(*args)

    monkeypatch.setattr(command, "study_layer", failing)
    with pytest.raises(RuntimeError, match="no memory left"):
        run_inspect(str(bert), tmp_path / "out", text=text, tokens=16)
    page = (tmp_path / "out" / "lln-inspect.html").read_text("utf-8")
    assert "The run was stopped. 2 of 3 layers to go." in Reader(page).text
    assert "refresh" not in page


@pytest.mark.parametrize(("words", "said"), [("w1", "1 token,"), ("w1 w2 w3", "3 tokens,")])
def test_a_few_tokens_are_too_few_to_measure(text, tmp_path, words, said):
    save_model(tmp_path / "model", LlamaModel, LlamaConfig, framed=False, num_key_value_heads=4)
    text.write_text(words)
    with pytest.raises(InvalidInputError, match=f"makes {said} too few .*give a longer --text"):
        run_inspect(str(tmp_path / "model"), tmp_path, text=text)


def test_short_texts_and_lengths_are_told_of(bert, text, tmp_path):
    def said(**options):
        lines = []
        run_inspect(str(bert), tmp_path, text=text, echo=lines.append, **options)
        return next(line for line in lines if "are few to measure on" in line)

    assert said(tokens=16).endswith("64 or more are better; raise --tokens.")
    assert said(tokens=40).endswith("64 or more are better.")
    text.write_text(" ".join(["w1 w2 w3 w4"] * 5))
    assert said(tokens=36).endswith("64 or more are better; give a longer --text.")


def test_text_that_is_not_utf8_is_a_sentence(bert, text, tmp_path):
    text.write_bytes(b"caf\xe9 " * 100)
    with pytest.raises(InvalidInputError, match=r"^--text .* is not UTF-8 text: byte 3 \(line 1\)"):
        run_inspect(str(bert), tmp_path, text=text)


def test_models_without_text(tmp_path):
    vit = ViTModel(ViTConfig(image_size=16, patch_size=4, **SIZES))
    vit.save_pretrained(tmp_path)
    with pytest.raises(InvalidInputError, match="ViTModel takes pixel_values, and inspect reads"):
        load_local_model(str(tmp_path))
    model = BertModel(BertConfig(vocab_size=64, **SIZES))
    model.save_pretrained(tmp_path / "bare")
    with pytest.raises(InvalidInputError, match="has a model but no vocabulary"):
        load_local_model(str(tmp_path / "bare"))
    (tmp_path / "bare" / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidInputError, match="its tokenizer cannot be loaded"):
        load_local_model(str(tmp_path / "bare"))


def test_transformers_missing(bert, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "lln_lab.inspection.local_model", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'lln\[hf\]'"):
        run_inspect(str(bert), tmp_path)


def test_default_text_is_prose_of_the_standard_library():
    text = read_text(None)
    assert "standard library" in text.name
    assert len(text.content) > 20_000
    assert "import" not in text.content.splitlines()[0]


def test_a_page_of_nothing_is_still_a_page():
    study = Study("m & m", "M", "a <text>", 8, 1)
    study.layers = [
        StudiedLayer("a", "softmax", 2, 4, 8, 8, False, problem="not measured: so it was")
    ]
    assert findings(study) == {}
    reader = Reader(render_page(study, choose_heads(study, None)))
    assert "m & m" in reader.text
    assert "a <text>" in reader.text
    assert json.loads(render_json(study, []))["layers"][0]["problem"]


def test_command_line(bert, text, tmp_path):
    arguments = ["inspect", str(bert), "--text", str(text), "--tokens", "16"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "Entropy runs from" in result.stdout
    assert (tmp_path / "lln-inspect.html").exists()
    form = {"window": 2, "sinks": 1, "pages": 3, "page_size": 4}
    given = [f"--{name.replace('_', '-')}={size}" for name, size in form.items()]
    result = CliRunner().invoke(app, [*arguments, *given, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    numbers = json.loads((tmp_path / "lln-inspect.json").read_text())
    assert [layer["pages"] for layer in numbers["layers"]] == [form] * 3


def test_help_names_the_sizes_of_a_conversion():
    shown = CliRunner().invoke(app, ["inspect", "--help"], env={"COLUMNS": "200"}).output
    words = " ".join(shown.replace("│", " ").split())
    causal, other = (Settings.usual_pages(side) for side in (True, False))
    assert f"are compared. Default: {causal['pages']}." in words
    assert causal["pages"] == other["pages"]
    assert f"Tokens in a page. Default: {causal['page_size']}." in words
    assert causal["page_size"] == other["page_size"]
    window, sinks = causal["window"], causal["sinks"]
    assert f"Default: {window} in a decoder, {other['window']} in an encoder." in words
    assert f"Default: {sinks} in a decoder, none in an encoder." in words
    assert other["sinks"] == 0


def test_the_work_of_a_head_is_bounded(tmp_path):
    """72 heads of 512 tokens are then less than 6e10 operations, some seconds of one core."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    save_model(tmp_path / "model", max_position_embeddings=128, **sizes)
    done = work(lambda: run_inspect(str(tmp_path / "model"), tmp_path))
    tokens = json.loads((tmp_path / "lln-inspect.json").read_text())["tokens"]
    assert tokens == 128
    assert done / (2 * tokens**2) < 3000
