"""Damaged checkpoints, converted or not, end in one sentence that names what is damaged."""

import copy
import json
import shutil

import pytest
import torch
import transformers
from tests.damage import JSON_FILES, OTHER_FILES, VALUES, cases, check_refusal

from lln.errors import InvalidInputError
from lln.integrations import folders
from lln.integrations.convert import convert
from lln.integrations.loading import load_model, load_tokenizer
from lln.integrations.sdpa import attach_described

# Trainer and torch warn about GPUs that are not there.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def originals(tiny, text, save_with_tokenizer, kept):
    """A plain checkpoint and converted ones: made once."""
    if not (kept / "plain").exists():
        model = tiny("bert")
        save_with_tokenizer(model, kept / "plain")
        model.save_pretrained(kept / "parts", max_shard_size="10KB")
        for attention in ("lln_diag", "lln_keys"):
            converted = copy.deepcopy(model)
            convert(converted, attention, calibrate=text(), verbose=False)
            converted.save_pretrained(kept / attention)
    return kept


@pytest.fixture
def made(originals, tmp_path):
    """Copies of them, which a test may change."""
    return shutil.copytree(originals, tmp_path / "made")


FILES = {
    "plain/config.json": JSON_FILES,
    "plain/model.safetensors": OTHER_FILES,
    "plain/tokenizer.json": JSON_FILES,
    "parts/model.safetensors.index.json": JSON_FILES,
    "lln_keys/config.json": JSON_FILES,
}


@pytest.mark.parametrize(("file", "damage"), cases(FILES))
def test_a_damaged_file_is_one_sentence(file, damage, originals):
    path = originals / file

    def read():
        if "tokenizer" in file:
            load_tokenizer(path.parent)("w1 w2 w3")
        else:
            model = load_model(path.parent)
            folders.check_runs(path.parent, model, None)

    check_refusal(path, damage, read)


def with_config(folder, change):
    path = folder / "config.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


LLN = ("matching", "statistics", "alpha", "momentum", "mix", "block_size", "keys", "select")
LLN += ("group_size", "offset", "convolution", "impl", "attached", "layers")
LLN += ("format",)
# Of a layer; ``keys`` is above.
SIZES = ("attention", "num_heads", "head_dim", "value_dim")


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_wrong_settings_are_one_sentence(made, value):
    def run():
        try:
            folders.check_runs(made / "lln_keys", load_model(made / "lln_keys"), None)
        except InvalidInputError as error:
            return str(error)

    whole = (made / "lln_keys" / "config.json").read_text()
    for name in (*LLN, *SIZES):
        config = json.loads(whole)
        holder = config["lln"] if name in LLN else next(iter(config["lln"]["layers"].values()))
        holder[name] = value
        (made / "lln_keys" / "config.json").write_text(json.dumps(config))
        said = run()
        assert said is None or ("lln_keys" in said and "\n" not in said), (name, said)


@pytest.mark.parametrize("layers", [[1], "x", {"encoder.layer.0.attention.self": None}])
def test_layers_that_are_none_name_the_file(made, layers):
    with_config(made / "lln_diag", lambda config: config["lln"].update(layers=layers))
    with pytest.raises(InvalidInputError, match=r"lln_diag/config\.json' cannot be used: .*conver"):
        load_model(made / "lln_diag")


def test_very_many_layers_are_refused_at_once(made, monkeypatch):
    def load(*args, **kwargs):
        raise AssertionError("the configuration was loaded")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", load)
    sizes = {"softmax": True}
    for count, said in ((20_000, "has 20,002 entries, and at most 10,000"), (300_000, "bytes")):
        many = {f"layer{index}": sizes for index in range(count)}
        with_config(
            made / "lln_diag", lambda config, many=many: config["lln"]["layers"].update(many)
        )
        with pytest.raises(InvalidInputError, match=said):
            load_model(made / "lln_diag")


@pytest.mark.parametrize("name", ["NoSuchModel", "pipeline", "BertConfig", "__doc__", ""])
def test_an_architecture_that_is_no_model_is_refused(made, name):
    with_config(made / "plain", lambda config: config.update(architectures=[name]))
    with pytest.raises(InvalidInputError, match=r"plain' cannot be loaded: config\.json names the"):
        load_model(made / "plain")


@pytest.mark.parametrize("name", ["missing.safetensors", "../plain/model.safetensors", "..", ""])
def test_an_index_that_points_nowhere_or_outside_is_refused(made, name):
    index = made / "parts" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][next(iter(content["weight_map"]))] = name
    index.write_text(json.dumps(content))
    with pytest.raises(InvalidInputError, match=r"index\.json' lists .* beside it; save the model"):
        load_model(made / "parts")


def test_tokens_that_the_model_does_not_know_are_named(made):
    batch = {"input_ids": torch.tensor([[3, 500]])}
    with pytest.raises(InvalidInputError, match=r"plain' gives token 500, and its model knows 99"):
        folders.check_runs(made / "plain", load_model(made / "plain"), batch)


@pytest.mark.parametrize(
    "described", [[], {"a": 1}, {"a": {"sizes": {}}}, {"no module": {"sizes": {}, "settings": {}}}]
)
def test_a_description_that_is_none_is_refused(tiny, described):
    with pytest.raises(InvalidInputError):
        attach_described(tiny("bert"), described)


def test_code_in_a_folder_is_neither_run_nor_asked_for(made, monkeypatch):
    check_code_is_not_run(made / "plain", (load_model, load_tokenizer), monkeypatch)


def check_code_is_not_run(folder, loaders, monkeypatch):
    seen = folder.parent / "seen"
    monkeypatch.setattr("builtins.input", lambda *question: "y")
    program = f"open({str(seen)!r}, 'w').close()\n"
    program += "from transformers import BertConfig, BertModel, BertTokenizerFast\n"
    program += "class C(BertConfig): pass\nclass M(BertModel): pass\n"
    program += "class T(BertTokenizerFast): pass\n"
    (folder / "own.py").write_text(program)
    auto = {"AutoConfig": "own.C", "AutoModel": "own.M", "AutoTokenizer": ["own.T", "own.T"]}

    def name_own_code(config):
        config.pop("architectures")
        config.update(auto_map=auto, model_type="own")

    with_config(folder, name_own_code)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"auto_map": auto, "tokenizer_class": "T"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for load in loaders:
        with pytest.raises(InvalidInputError, match="plain' cannot be loaded: "):
            load(folder)
    assert not seen.exists()
