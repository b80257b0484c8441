"""Text for masked-language modelling: articles, windows, hidden tokens, tokenizers."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from lab.tests.tasks.data_files import is_one_sentence, needs_folder, own_copies, write

from lln.errors import InvalidInputError
from lln_lab.experiments.catalogue import EXPERIMENTS
from lln_lab.experiments.tasks.masked_text import (
    NO_QUESTION,
    byte_code,
    cut_windows,
    hide,
    masked_text,
    read_articles,
    split_articles,
    train_bpe,
)

WIKITEXT = """ 
 = First = 
 
 Some words <unk> . 
 
 = = Part = = 
 
 W 
 = Played , D 
 = Drawn = 
 More . 
 
 = The @-@ second = 
 
 Its words . 
"""


@own_copies
def test_articles_of_wikitext_start_at_their_titles(tmp_path):
    write(tmp_path / "wikitext-2" / "valid.txt.xz", WIKITEXT)
    first, second = read_articles(tmp_path, "wikitext-2", "valid")
    assert first.startswith("= First =")
    assert first.endswith("More .")
    assert "= = Part = =" in first
    assert second.split("\n")[0].strip() == "= The @-@ second ="


@own_copies
def test_articles_of_wikipedia_end_at_empty_lines(tmp_path):
    write(tmp_path / "wikipedia-en" / "valid.txt", "= A =\nOne.\nTwo.\n\n= B =\nThree.\n\n")
    found = read_articles(tmp_path, "wikipedia-en", "valid")
    assert found == ["= A =\nOne.\nTwo.", "= B =\nThree."]


def test_unknown_texts_are_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="no text is called 'wikitext-103'") as error:
        read_articles(tmp_path, "wikitext-103", "train")
    assert is_one_sentence(error)


@pytest.fixture
def encyclopedia(tmp_path):
    for part, numbers in (("train", range(100)), ("valid", range(100, 110))):
        text = "".join(f"= t{i} =\n{'some words ' * 5}\n\n" for i in numbers)
        write(tmp_path / "wikipedia-en" / f"{part}.txt.xz", text)
    return tmp_path


@own_copies
def test_parts_of_wikipedia_are_disjoint(encyclopedia):
    parts = split_articles(encyclopedia, "wikipedia-en", share=0.1)
    assert {name: len(texts) for name, texts in parts.items()} == {
        "train": 90,
        "valid": 10,
        "test": 10,
    }
    assert len({text for texts in parts.values() for text in texts}) == 110
    assert parts == split_articles(encyclopedia, "wikipedia-en", share=0.1)


@own_copies
def test_parts_of_wikitext_are_its_own(tmp_path):
    for part in ("train", "valid", "test"):
        write(tmp_path / "wikitext-2" / f"{part}.txt", WIKITEXT.replace("First", part))
    parts = split_articles(tmp_path, "wikitext-2")
    assert {name: texts[0].split()[1] for name, texts in parts.items()} == {
        name: name for name in ("train", "valid", "test")
    }


@own_copies
def test_both_texts_of_table_1_are_read_and_have_tokens_of_their_own(tmp_path):
    articles = "\n\n".join(f"Title {number}\nText of number {number}." for number in range(200))
    for part in ("train", "valid", "test"):
        write(tmp_path / "wikitext-2" / f"{part}.txt", 9 * WIKITEXT)
        write(tmp_path / "wikipedia-en" / f"{part}.txt", articles)
    plans = EXPERIMENTS["table1"].plans["small"]
    first, second = (
        plans[name].load.func(400, tmp_path, 16, **plans[name].load.keywords)
        for name in ("mlm", "wikitext")
    )
    assert (first.name, second.name) == ("masked-wikipedia-en", "masked-wikitext-2")
    # Two words of WikiText do not make a vocabulary of 400.
    assert first.vocabulary != second.vocabulary
    assert plans["mlm"].recipe == plans["wikitext"].recipe


def test_windows_hold_the_text_in_order():
    code = byte_code()
    windows = cut_windows(["abcd", "efg"], code, 3)
    assert windows.tolist() == [[98, 99, 100], [101, code.end, 102], [103, 104, code.end]]
    assert cut_windows(["abcd", "efg"], code, 4).shape == (2, 4)


@pytest.mark.parametrize("articles", [["ab"], []])
def test_a_text_shorter_than_a_window_is_refused(articles):
    with pytest.raises(InvalidInputError, match="fewer than one window of 8") as error:
        cut_windows(articles, byte_code(), 8)
    assert is_one_sentence(error)


def test_tokens_outside_the_vocabulary_are_refused():
    with pytest.raises(InvalidInputError, match="but the vocabulary is 90"):
        cut_windows(["abcdefgh"], replace(byte_code(), vocabulary=90), 4)


def test_hidden_tokens_follow_the_recipe():
    code = byte_code()
    random = np.random.default_rng(0)
    ids = random.integers(1, 257, (200, 500)).astype(np.int32)
    ids[:, ::10] = code.end
    seen, labels = hide(ids, code, random)
    hidden = labels != NO_QUESTION
    plain = ids != code.end
    assert not hidden[~plain].any()
    assert hidden[plain].mean() == pytest.approx(0.15, abs=0.005)
    assert (labels[hidden] == ids[hidden]).all()
    assert (seen[~hidden] == ids[~hidden]).all()
    masked, kept = seen[hidden] == code.mask, seen[hidden] == ids[hidden]
    assert masked.mean() == pytest.approx(0.8, abs=0.01)
    assert kept.mean() == pytest.approx(0.1 + 0.1 / 256, abs=0.01)
    others = seen[hidden][~masked & ~kept]
    assert (others.min(), others.max()) == (1, 256)


@own_copies
def test_the_task_hides_train_anew_and_the_rest_once(encyclopedia):
    articles = split_articles(encyclopedia, "wikipedia-en", share=0.1)
    task, again = (masked_text(articles, byte_code(), "wikipedia-en", 64) for _ in range(2))
    assert (task.classes, task.vocabulary) == (0, 259)
    assert "not WikiText-103" in task.title
    for one, other in ((task.valid, again.valid), (task.test, again.test)):
        assert (one.ids == other.ids).all()
        assert (one.labels == other.labels).all()
    first, other_window = task.train[0], task.train[1]
    assert first["labels"].equal(again.train[0]["labels"])
    task.train.set_epoch(1)
    assert not first["labels"].equal(task.train[0]["labels"])
    task.train.set_epoch(0)
    assert not (first["labels"] == NO_QUESTION).equal(other_window["labels"] == NO_QUESTION)
    assert "attention_mask" not in first
    assert first["input_ids"].shape == first["labels"].shape == (64,)
    shown = first["labels"] == NO_QUESTION
    assert first["input_ids"][shown].equal(torch.from_numpy(task.train.ids[0]).long()[shown])
    assert len(task.first(3, 2).train) == 3
    assert task.first(3, 2).train[0]["labels"].equal(first["labels"])


# Tokenizers


def test_bpe_learns_from_the_text():
    pytest.importorskip("tokenizers")
    texts = ["the cat and the hat, the é"] * 20
    code = train_bpe(texts, vocabulary=300)
    assert 259 < code.vocabulary <= 300
    windows = cut_windows(texts, code, 5)
    low, high = code.plain
    assert (low, high) == (3, code.vocabulary)
    assert all((low <= window[window != code.end]).all() for window in windows)
    assert len(code.encode(texts[0])) < len(byte_code().encode(texts[0]))
    assert list(code.encode("the the")) == list(train_bpe(texts, 300).encode("the the"))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InvalidInputError, match=r"pip install 'lln\[hf\]'") as error:
        train_bpe(["text"])
    assert is_one_sentence(error)


# The real sets


@needs_folder
@pytest.mark.parametrize(
    ("data_set", "counts"), [("wikitext-2", (600, 60, 60)), ("wikipedia-en", (6475, 200, 232))]
)
def test_real_articles(data_set, counts):
    parts = split_articles(None, data_set)
    assert tuple(map(len, parts.values())) == counts
    assert all(text.startswith("= ") for texts in parts.values() for text in texts)
    assert len({text for texts in parts.values() for text in texts}) == sum(counts)
    small = {name: texts[:20] for name, texts in parts.items()}
    task = masked_text(small, byte_code(), data_set)
    assert task.train.ids.shape[1] == 512
    assert (task.valid.labels != NO_QUESTION).mean() == pytest.approx(0.15, abs=0.01)


@needs_folder
def test_real_words():
    words = {
        part: sum(len(text.split()) for text in texts)
        for part, texts in split_articles(None, "wikitext-2").items()
    }
    assert words == {"train": 2_051_910, "valid": 213_886, "test": 241_211}
