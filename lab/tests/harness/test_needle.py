"""The needle is where it is said to be, is asked for, and is scored as greedy decoding would."""

import json

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lln_lab.experiments import needle
from lln_lab.experiments.decoder_conversion import FIRST_MEASURED

LETTERS = "abcdefghijklmnopqrstuvwxyzPRT .\n0123456789"


@pytest.fixture(scope="module")
def tokenizer():
    """One token for every letter."""
    letters = {letter: place for place, letter in enumerate(LETTERS)}
    found = Tokenizer(models.WordLevel(letters, unk_token="z"))
    found.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=found, unk_token="z", pad_token="z")


def tiny(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=len(LETTERS), **sizes, **heads, **options)
    config.initializer_range = 0.3
    return LlamaForCausalLM(config).eval()


def read(tokenizer, ids):
    return "".join(LETTERS[place] for place in ids.tolist())


@pytest.mark.parametrize("depth", needle.DEPTHS)
def test_the_key_is_said_once_at_its_depth_and_asked_for_at_the_end(tokenizer, depth):
    haystack = torch.arange(200) % 26
    ids, length = needle.hide(haystack, tokenizer, 12345, depth)
    assert len(ids) == 200
    assert length == 6
    text = read(tokenizer, ids)
    said = "\nThe pass key is 12345. Remember it.\n"
    assert text.count(said) == 1
    assert text.endswith("\nThe pass key is 12345")
    assert text.count("12345") == 2
    hay = 200 - len(said) - len("\nThe pass key is 12345")
    assert text.index(said) == round(depth * hay)
    assert text.replace(said, "")[:hay] == read(tokenizer, haystack[:hay])


def test_scores_are_those_of_greedy_decoding(tokenizer):
    """Also where the answer is right: one that the model itself gives."""
    model, haystack = tiny(), torch.arange(120) % 26
    ids, length = needle.hide(haystack, tokenizer, 12345, 0.5)
    greedy = model.generate(
        ids[None, :-length], max_new_tokens=length, do_sample=False, eos_token_id=None
    )[0]
    own = torch.cat([ids[:-length], greedy[-length:]])
    for answered, is_right in ((ids, False), (own, True)):
        found = needle.answer(model, answered, length)
        with torch.no_grad():
            scores = model(answered[None]).logits[0, -length - 1 : -1].log_softmax(-1)
        assert found[0] == is_right == torch.equal(greedy, answered)
        expected = scores[torch.arange(length), answered[-length:]].sum().item()
        assert found[1] == pytest.approx(expected, rel=1e-5)
    # One wrong token is a wrong answer, whichever it is.
    for place in range(1, length + 1):
        wrong = own.clone()
        wrong[-place] = (wrong[-place] + 1) % len(LETTERS)
        assert not needle.answer(model, wrong, length)[0]


class Finder:
    """Says what followed the same five tokens before, as far back as it sees."""

    def __init__(self, sees):
        self.sees = sees

    def __call__(self, ids, use_cache, logits_to_keep):
        (text,), rows = ids, []
        for end in range(ids.shape[1] - logits_to_keep + 1, ids.shape[1] + 1):
            scores = torch.zeros(len(LETTERS))
            for at in range(max(end - self.sees, 5), end - 1):
                if torch.equal(text[at - 5 : at], text[end - 5 : end]):
                    scores[text[at]] = 9.0
            rows.append(scores)
        return type("Output", (), {"logits": torch.stack(rows)[None]})


def test_whoever_looks_back_far_enough_finds_it(tokenizer):
    haystacks = torch.randint(26, (3, 300), generator=torch.Generator().manual_seed(0))
    all_seen = needle.measure(Finder(300), tokenizer, haystacks)
    half_seen = needle.measure(Finder(120), tokenizer, haystacks)
    assert [all_seen[str(depth)]["exact"] for depth in needle.DEPTHS] == [1.0] * 5
    assert [half_seen[str(depth)]["exact"] for depth in needle.DEPTHS] == [0.0] * 3 + [1.0] * 2
    blind = -6 * torch.tensor(float(len(LETTERS))).log().item()
    assert half_seen["0.0"]["log_probability"] == pytest.approx(blind, abs=1e-3)
    assert all_seen["0.0"]["log_probability"] > -0.1
    rows = {"softmax": {"300": all_seen}, "pages": {"300": half_seen}}
    less, error = needle.less_than_softmax(rows, "pages", "300", "0.0")
    assert less == pytest.approx(blind, abs=0.1)
    assert error == pytest.approx(0, abs=1e-3)
    assert "| pages | 300 | 0% (-22" in needle.summary({"rows": rows})


def test_every_key_differs_and_is_the_same_in_every_run():
    keys = needle.keys_of(20)
    assert len({key for row in keys for key in row}) > 95
    assert keys == needle.keys_of(20)
    assert keys[:7] == needle.keys_of(7)
    assert {len(str(key)) for row in keys for key in row} == {5}


@pytest.mark.filterwarnings("ignore::lln.errors.CalibrationWarning")
def test_it_runs_with_a_tiny_model_and_goes_on_where_it_stopped(
    tokenizer, tmp_path, monkeypatch, capsys
):
    tiny(max_position_embeddings=512).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    letters = torch.randint(26, (256 * (FIRST_MEASURED + 2),)).tolist()
    (tmp_path / "valid.txt").write_text("".join(LETTERS[place] for place in letters))
    # Window and sinks are less than the text, and so are pages.
    sizes = {"window": 20, "sinks": 4, "pages": 2}
    monkeypatch.setattr(needle, "CAUSAL_PAGES", needle.CAUSAL_PAGES | sizes)
    monkeypatch.setitem(needle.ROWS, "pages", needle.ROWS["pages"] | sizes)
    arguments = ["--data", str(tmp_path), "--model", str(tmp_path / "model"), "--device", "cpu"]
    arguments += ["--out", str(tmp_path / "out.json"), "--tokens", "256"]
    needle.main([*arguments, "--rows", "softmax"])
    first = json.loads((tmp_path / "out.json").read_text())
    assert list(first["rows"]) == ["softmax"]
    needle.main(arguments)
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["rows"]["softmax"] == first["rows"]["softmax"]
    assert list(results["rows"]) == list(needle.ROWS)
    assert results["setup"]["command"] == "python -m lln_lab.experiments.needle"
    assert {"device", "torch", "transformers", "commit"} <= results["setup"].keys()
    cells = [results["rows"][row]["256"] for row in needle.ROWS]
    for depth in map(str, needle.DEPTHS):
        each = [cell[depth]["each"] for cell in cells]
        # All that the file has, which is less than what is asked for.
        assert all(len(one) == 2 for one in each)
        # Three attentions.
        assert each[0] != each[1] != each[2] != each[0]
    assert "| pages | 256 |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        needle.main([*arguments, "--tokens", "400"])
    assert "give a longer file or fewer --tokens" in capsys.readouterr().err


def test_window_and_sinks_alone_are_the_attention_without_pages(monkeypatch):
    model = needle.prepare(tiny(max_position_embeddings=512), needle.ALONE, {})
    ids = torch.randint(26, (1, 300))
    with torch.no_grad():
        before = model(ids).logits[0, -1]
        # Two layers see twice the window; neither sinks nor window hold the places between.
        ids[0, 20:40] = (ids[0, 20:40] + 1) % 26
        near = model(ids).logits[0, -1]
        ids[0, 3] = (ids[0, 3] + 1) % 26
        sinks = model(ids).logits[0, -1]
    assert torch.equal(near, before)
    assert not torch.allclose(sinks, near)
