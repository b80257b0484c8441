"""LRA's Text and Image, retrieval over Wikipedia, cats and dogs."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from lab.tests.tasks.data_files import (
    coefficients,
    is_one_sentence,
    needs_folder,
    own_copies,
    write,
    write_arrays,
    write_rows,
)

from lln.errors import InvalidInputError
from lln_lab.experiments.tasks.block_images import cosine_patterns, decode_blocks
from lln_lab.experiments.tasks.byte_tokens import byte_ids
from lln_lab.experiments.tasks.cats_dogs import cats_dogs, to_rgb
from lln_lab.experiments.tasks.lra_image import lra_image
from lln_lab.experiments.tasks.lra_text import lra_text
from lln_lab.experiments.tasks.retrieval import LEAST, PairExamples, article_pairs, retrieval


def rows_of(examples):
    return {row.tobytes() for row in examples.ids}


# Text


@pytest.fixture
def reviews(tmp_path):
    texts = {
        part: [f"{part} {i} é " + "x" * (i * 7) for i in range(60)] for part in ("train", "test")
    }
    for part, lines in texts.items():
        rows = [(i % 2, text) for i, text in enumerate(lines)]
        write_rows(tmp_path / "imdb" / f"{part}.tsv.xz", ("text",), rows)
    return tmp_path, texts


@own_copies
def test_text_is_the_bytes_plus_one(reviews):
    folder, texts = reviews
    task = lra_text(folder, length=256, cut=200)
    assert (task.classes, task.vocabulary, task.pairs) == (2, 257, False)
    for text, example in zip(texts["test"], task.test, strict=True):
        expected = [byte + 1 for byte in text.encode()[:200]]
        assert example["input_ids"].tolist() == expected + [0] * (256 - len(expected))
        assert example["attention_mask"].tolist() == [int(i < len(expected)) for i in range(256)]
    assert task.test.labels.tolist() == [0, 1] * 30


@own_copies
def test_text_has_the_sizes_of_the_protocol(reviews):
    folder, _ = reviews
    write_rows(folder / "imdb" / "test.tsv.xz", ("text",), [(1, "y" * 5000)])
    test = lra_text(folder).test
    assert test.ids.shape == (1, 4096)
    assert np.count_nonzero(test.ids) == test.lengths[0] == 4000
    assert lra_text(folder, length=128).test.lengths[0] == 128


@own_copies
def test_text_cuts_valid_off_train(reviews):
    folder, _ = reviews
    task = lra_text(folder, length=512)
    assert (len(task.train), len(task.valid), len(task.test)) == (54, 6, 60)
    assert np.bincount(task.valid.labels).tolist() == [3, 3]
    parts = [rows_of(part) for part in (task.train, task.valid, task.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 120


def test_all_bytes_have_ids():
    assert byte_ids(bytes(range(256))).tolist() == list(range(1, 257))
    assert byte_ids("é", 1).tolist() == [0xC3 + 1]


# Pictures


def slow_block(values, steps):
    """The sum in the docstring of `block_images`, term by term."""
    block = np.empty((8, 8))
    for i in range(8):
        for j in range(8):
            total = 128.0
            for u in range(8):
                for v in range(8):
                    scale = (math.sqrt(1 / 8) if u == 0 else 0.5) * (
                        math.sqrt(1 / 8) if v == 0 else 0.5
                    )
                    waves = math.cos((2 * i + 1) * u * math.pi / 16) * math.cos(
                        (2 * j + 1) * v * math.pi / 16
                    )
                    total += scale * waves * int(values[8 * u + v]) * int(steps[u, v])
            block[i, j] = total
    return np.clip(np.rint(block), 0, 255)


def test_blocks_are_decoded_like_the_sum_of_their_terms():
    random = np.random.default_rng(0)
    stored, steps = coefficients(random, 2, 4), random.integers(1, 6, (8, 8)).astype(np.uint8)
    images = decode_blocks(stored, steps, 16)
    assert images.shape == (2, 16, 16)
    for image in range(2):
        for block in range(4):
            down, across = divmod(block, 2)
            found = images[image, 8 * down : 8 * down + 8, 8 * across : 8 * across + 8]
            expected = slow_block(stored[:, image, block], steps)
            # float32 may round a number that ends in .5 to the other side.
            assert np.abs(found - expected).max() <= 1
            assert (found == expected).mean() > 0.95


def test_patterns_are_orthonormal():
    patterns = cosine_patterns()
    np.testing.assert_allclose(patterns @ patterns.T, np.eye(8), atol=1e-6)


def test_a_single_coefficient_is_a_wave_in_its_direction():
    stored = np.zeros((64, 1, 1), dtype=np.int8)
    # u = 1, v = 0: brightness changes from top to bottom only.
    stored[8] = 100
    image = decode_blocks(stored, np.full((8, 8), 4, dtype=np.uint8), 8)[0].astype(int)
    assert (np.diff(image, axis=1) == 0).all()
    assert (np.diff(image, axis=0) < 0).any()
    assert (np.diff(image, axis=0) <= 0).all()


def test_blocks_that_do_not_fit_are_refused():
    with pytest.raises(InvalidInputError, match=r"need coefficients \[64, n, 16\]") as error:
        decode_blocks(np.zeros((64, 2, 4), np.int8), np.ones((8, 8)), 32)
    assert is_one_sentence(error)


@pytest.fixture
def grey(tmp_path):
    random = np.random.default_rng(0)
    for part, count in (("train", 200), ("test", 40)):
        stored = coefficients(random, count, 16)
        # Blocks that are all black and all white.
        stored[:, 0] = 0
        stored[0, 0, :8], stored[0, 0, 8:] = -128, 127
        write_arrays(
            tmp_path / "cifar10-gray" / f"{part}.npz",
            coef=stored,
            Q=np.full((8, 8), 8, dtype=np.uint8),
            y=(np.arange(count) % 10).astype(np.uint8),
        )
    return tmp_path


@own_copies
def test_no_pixel_is_padding(grey):
    task = lra_image(grey)
    assert (task.classes, task.vocabulary, task.train.ids.shape) == (10, 257, (180, 1024))
    for part in (task.train, task.valid, task.test):
        assert part.ids.min() >= 1
        assert part.ids.max() <= 256
    assert task.test.ids[0, 0] == 1
    assert task.test.ids[0, -1] == 256
    assert "attention_mask" not in task.test[0]


@own_copies
def test_pixels_come_row_by_row(grey):
    task = lra_image(grey)
    with np.load(grey / "cifar10-gray" / "test.npz") as arrays:
        images = decode_blocks(arrays["coef"], arrays["Q"], 32)
    assert task.test.ids[5, 32 * 3 + 7] == images[5, 3, 7] + 1


@own_copies
def test_image_cuts_valid_off_train(grey):
    task = lra_image(grey)
    assert np.bincount(task.train.labels).tolist() == [18] * 10
    assert np.bincount(task.valid.labels).tolist() == [2] * 10
    assert not rows_of(task.train) & rows_of(task.valid)


@own_copies
def test_labels_that_do_not_fit_are_refused(grey):
    path = grey / "cifar10-gray" / "test.npz"
    with np.load(path) as arrays:
        stored = dict(arrays)
    for wrong in (stored["y"][:-1], np.full_like(stored["y"], 10)):
        write_arrays(path, **(stored | {"y": wrong}))
        with pytest.raises(InvalidInputError, match="one label from 0 to 9 per image"):
            lra_image(grey)


@own_copies
def test_cats_and_dogs(tmp_path):
    random = np.random.default_rng(0)
    for part, count in (("train", 40), ("valid", 10)):
        write_arrays(
            tmp_path / "cats-dogs" / f"{part}.npz",
            Y=coefficients(random, count, 64),
            Cb=coefficients(random, count, 16),
            Cr=coefficients(random, count, 16),
            QY=np.ones((8, 8), np.uint8),
            QC=np.ones((8, 8), np.uint8),
            y=(np.arange(count) % 2).astype(np.uint8),
        )
    task = cats_dogs(tmp_path)
    assert task.train.images.shape == (36, 64, 64, 3)
    assert np.bincount(task.valid.labels).tolist() == [2, 2]
    assert (len(task.test), task.classes) == (10, 2)
    example = task.test[3]
    assert example["pixel_values"].shape == (3, 64, 64)
    assert example["pixel_values"].dtype == torch.float32
    assert float(example["pixel_values"][2, 5, 9]) * 255 == pytest.approx(
        int(task.test.images[3, 5, 9, 2])
    )
    assert int(example["labels"]) == 1
    smaller = task.first(8, 3)
    assert (len(smaller.train), len(smaller.valid), len(smaller.test)) == (8, 3, 3)


def test_colours():
    brightness = np.full((1, 2, 2), 76, np.uint8)
    grey, red = (np.full((1, 1, 1), value, np.uint8) for value in (128, 255))
    assert to_rgb(brightness, grey, grey)[0, 1, 1].tolist() == [76, 76, 76]
    # JFIF's red: Y = 76, Cb = 85, Cr = 255.
    blue = np.full((1, 1, 1), 85, np.uint8)
    assert to_rgb(brightness, blue, red)[0, 0, 1].tolist() == [254, 0, 0]


# Retrieval


def article(title, paragraphs, size=200):
    return [f"{title}/{i} ".ljust(size, ".") for i in range(paragraphs)]


@pytest.fixture
def articles():
    # No two of one length.
    return {f"t{i}": article(f"t{i}", 4 + i % 5, 200 + 3 * i) for i in range(20)}


def origin(text):
    return text.split(b"/")[0].decode()


def test_pairs_are_of_one_or_of_two_articles(articles):
    pairs = article_pairs(articles, most=1000)
    assert Counter(pair.label for pair in pairs) == {0: 20, 1: 20}
    for pair in pairs:
        assert pair.titles == tuple(map(origin, pair.texts))
        assert pair.label == (origin(pair.texts[0]) == origin(pair.texts[1]))


def test_halves_are_disjoint(articles):
    for pair in article_pairs(articles, most=1000):
        if pair.label:
            first, second = ({line.split(b" ")[0] for line in t.split(b"\n")} for t in pair.texts)
            assert not first & second
            assert max(first) < min(second)


def test_neither_a_text_nor_a_length_tells_the_label(articles):
    pairs = article_pairs(articles, most=1000)
    for side in (0, 1):
        labels = {}
        for pair in pairs:
            labels.setdefault(pair.texts[side], []).append(pair.label)
        assert all(sorted(found) == [0, 1] for found in labels.values())
    lengths = {
        label: sorted(tuple(map(len, pair.texts)) for pair in pairs if pair.label == label)
        for label in (0, 1)
    }
    assert lengths[0] == lengths[1]
    assert all(one == other for one, other in lengths[0])


def test_short_articles_are_left_out(articles):
    short = {"short": article("short", 2, LEAST - 1), "one": article("one", 1, 5 * LEAST)}
    assert article_pairs(articles | short, 1000) == article_pairs(articles, 1000)


@pytest.fixture
def encyclopedia(tmp_path):
    for part, numbers in (("train", range(60)), ("valid", range(60, 80))):
        text = "".join(
            "\n".join([f"= t{i} =", *article(f"t{i}", 4 + i % 5)]) + "\n\n" for i in numbers
        )
        write(tmp_path / "wikipedia-en" / f"{part}.txt.xz", text)
    return tmp_path


def decoded(row):
    return bytes((row[row > 0] - 1).astype(np.uint8))


@own_copies
def test_articles_are_in_one_part_only(encyclopedia):
    task = retrieval(encyclopedia, length=1024)
    assert task.pairs
    assert "not AAN" in task.title
    titles = {}
    for name in ("train", "valid", "test"):
        part = getattr(task, name)
        assert np.bincount(part.labels).tolist() == [len(part) // 2] * 2
        assert part.ids.shape[1] == 2048
        sides = [[origin(decoded(row)) for row in part.ids[:, s]] for s in np.s_[:1024, 1024:]]
        assert [int(a == b) for a, b in zip(*sides, strict=True)] == part.labels.tolist()
        titles[name] = set(sides[0]) | set(sides[1])
    assert sum(map(len, titles.values())) == len(set.union(*titles.values())) == 80


@own_copies
def test_both_texts_have_a_mask_of_their_own(encyclopedia):
    part = retrieval(encyclopedia, length=1024).first(5, 5).train
    assert len(part) == 5
    for example, row in zip(part, part.ids, strict=True):
        assert example["attention_mask"].tolist() == (row > 0).astype(int).tolist()
        assert 0 < example["attention_mask"][1024:].sum() < 1024


def test_masks_of_texts_of_two_lengths():
    ids = np.array([[5, 0, 0, 6, 7, 0]], dtype=np.uint16)
    pairs = PairExamples(ids, np.array([1]), np.array([[1, 2]], dtype=np.int32))
    assert pairs[0]["attention_mask"].tolist() == [1, 0, 0, 1, 1, 0]
    assert pairs.first(1)[0]["labels"].tolist() == 1


@own_copies
def test_rounds_add_other_pairs_to_train_alone(encyclopedia):
    one, three = (retrieval(encyclopedia, length=1024, rounds=rounds) for rounds in (1, 3))
    assert len(three.train) > 2 * len(one.train)
    assert rows_of(three.test) == rows_of(one.test)
    assert np.bincount(three.train.labels).tolist() == [len(three.train) // 2] * 2
    again = retrieval(encyclopedia, length=1024, rounds=3)
    assert (again.train.ids == three.train.ids).all()


@own_copies
def test_too_few_articles_are_refused(tmp_path):
    for part in ("train", "valid"):
        write(tmp_path / "wikipedia-en" / f"{part}.txt", f"= {part} =\nshort\n\n")
    with pytest.raises(InvalidInputError, match="too few articles") as error:
        retrieval(tmp_path)
    assert is_one_sentence(error)


# The real sets


@needs_folder
def test_real_text():
    task = lra_text(None)
    assert (
        np.bincount(np.concatenate([task.train.labels, task.valid.labels])).tolist() == [4000] * 2
    )
    assert np.bincount(task.valid.labels).tolist() == [400, 400]
    assert np.bincount(task.test.labels).tolist() == [2500, 2500]
    assert not rows_of(task.train) & (rows_of(task.valid) | rows_of(task.test))
    assert 0.02 < (np.concatenate([task.train.lengths, task.test.lengths]) == 4000).mean() < 0.04


@needs_folder
def test_real_image():
    task = lra_image(None)
    counts = [np.bincount(part.labels).tolist() for part in (task.train, task.valid, task.test)]
    assert counts == [[1440] * 10, [160] * 10, [400] * 10]
    assert not rows_of(task.train) & rows_of(task.valid)
    # Photographs: neighbours are alike, in both directions.
    images = task.test.ids.reshape(-1, 32, 32).astype(int)
    for axis in (1, 2):
        assert np.abs(np.diff(images, axis=axis)).mean() < 0.3 * images.std()


@needs_folder
def test_real_retrieval():
    task = retrieval(None)
    for part in (task.train, task.valid, task.test):
        assert np.bincount(part.labels).tolist() == [len(part) // 2] * 2
    assert len(task.train) > 10_000
    assert min(len(task.valid), len(task.test)) > 1_300


@needs_folder
def test_real_cats_and_dogs():
    task = cats_dogs(None)
    counts = [np.bincount(part.labels).tolist() for part in (task.train, task.valid, task.test)]
    assert counts == [[2700] * 2, [300] * 2, [600] * 2]
    assert task.test.images.shape == (1200, 64, 64, 3)
    assert 100 < task.test.images.mean() < 140
