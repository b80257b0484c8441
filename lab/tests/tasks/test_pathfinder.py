"""Pathfinder: labels follow from the lines on the image; paths, markers and tokens are as told."""

import math
from collections import Counter
from random import Random

import numpy as np
import pytest

from lln_lab.experiments.tasks import pathfinder

FINE = 4
LENGTHS = {6: 60, 9: 60, 14: 200}


@pytest.fixture(scope="module")
def made():
    return {
        length: pathfinder.images(count, 0, "train", length, with_paths=True)
        for length, count in LENGTHS.items()
    }


@pytest.fixture(scope="module")
def drawings(made):
    return [drawing for _, _, drawings in made.values() for drawing in drawings]


def points(ends):
    """Points close together along dashes (or gaps), each given by two ends."""
    share = np.linspace(0, 1, 33)[:, None]
    return (ends[:, None, 0] * (1 - share) + ends[:, None, 1] * share).reshape(-1, 2)


def gaps(path):
    return np.stack([path[:-1, 1], path[1:, 0]], axis=1)


def cells(path):
    """The cells of a fine grid that a pen touches that goes along a path without being lifted."""
    line = np.concatenate([points(path), points(gaps(path))])
    return {(y, x) for y, x in np.rint(line * FINE).astype(int).tolist()}


def flooded(start, paper):
    """All cells of a set that hang together with one of them, corners included."""
    found, edge = {start}, [start]
    while edge:
        y, x = edge.pop()
        around = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)}
        new = (around & paper) - found
        found |= new
        edge += new
    return found


def test_labels_are_what_following_the_lines_gives(drawings):
    for drawing in drawings:
        paper = cells(drawing.targets[0]) | cells(drawing.targets[1])
        start, end = ((FINE * y, FINE * x) for y, x in drawing.markers)
        assert {start, end} <= paper
        assert (end in flooded(start, paper)) == drawing.label


def test_markers_are_ends_of_the_right_paths(drawings):
    for drawing in drawings:
        starts = [tuple(path[0, 0]) for path in drawing.targets]
        ends = [tuple(path[-1, 1]) for path in drawing.targets]
        first, last = drawing.markers
        assert (starts.index(first) == ends.index(last)) == drawing.label


def test_both_labels_and_both_paths_are_as_frequent(made, drawings):
    _, labels, last = made[14]
    assert labels.tolist() == [drawing.label for drawing in last]
    assert set(labels.tolist()) == {0, 1}
    labels = np.array([drawing.label for drawing in drawings])
    first = [tuple(d.targets[0][0, 0]) == d.markers[0] for d in drawings]
    assert labels.mean() == pytest.approx(0.5, abs=0.1)
    assert np.mean(first) == pytest.approx(0.5, abs=0.1)
    assert np.mean(first == labels) == pytest.approx(0.5, abs=0.1)


def test_markers_are_the_discs_on_the_image(drawings):
    for drawing in drawings:
        pixels = np.pad(drawing.pixels, 1)
        middle = pixels[1:-1, 1:-1]
        shifted = [pixels[:-2, 1:-1], pixels[2:, 1:-1], pixels[1:-1, :-2], pixels[1:-1, 2:]]
        plus = np.minimum.reduce([middle, *shifted])
        found = {(y, x) for y, x in np.argwhere(plus > 180).tolist()}
        # Discs that touch or lie on a bright dash make more.
        assert set(drawing.markers) <= found
        assert all(
            min(np.hypot(y - my, x - mx) for my, mx in drawing.markers) < 3 for y, x in found
        )


def test_what_is_drawn_is_seen_and_nothing_else(drawings):
    for drawing in drawings:
        image = drawing.pixels.astype(float)
        assert image.max() == 255
        kinds = {"targets": drawing.targets, "distractors": drawing.distractors}
        levels = {}
        for kind, paths in kinds.items():
            if paths:
                y, x = np.rint(np.concatenate(paths).mean(1)).astype(int).T
                levels[kind] = image[y, x]
                assert levels[kind].min() > 60
        if len(levels) == 2:
            assert np.median(levels["distractors"]) > np.median(levels["targets"])
        ink = np.concatenate([points(path) for path in drawing.targets + drawing.distractors])
        ink = np.concatenate([ink, np.array(drawing.markers, dtype=float)])
        bright = np.argwhere(image >= 30)
        distance = np.sqrt(((bright[:, None] - ink[None]) ** 2).sum(-1)).min(1)
        assert distance.max() < 2.3
        assert len(bright) < 0.4 * image.size


def test_paths_keep_to_the_rules(made):
    for length, (_, _, drawings) in made.items():
        for drawing in drawings:
            first, second = drawing.targets
            assert len(first) == len(second) == length
            assert ((first[0, 0] >= 14) & (first[0, 0] < 18)).all()
            assert np.hypot(*(first[0, 0] - second[0, 0])) == pytest.approx(7, abs=0.75)
            assert len(drawing.distractors) <= 20 // (length // 3)
            assert {len(path) for path in drawing.distractors} <= {length // 3}
            paths = drawing.targets + drawing.distractors
            for path in paths:
                runs = path[:, 1] - path[:, 0]
                assert np.hypot(*runs.T) == pytest.approx(2)
                # Two margins between dashes, up to rounding; turns are below 90°.
                if len(path) > 1:
                    assert (
                        np.abs(np.hypot(*(gaps(path)[:, 1] - gaps(path)[:, 0]).T) - 2).max() < 1.5
                    )
                assert ((runs[1:] * runs[:-1]).sum(1) > -1e-9).all()
                assert (path >= 1).all()
                assert (path <= 30).all()
        share = np.mean([len(drawing.distractors) for drawing in drawings]) / (20 // (length // 3))
        assert share > 0.6


def test_lines_keep_their_distance(drawings):
    for drawing in drawings[::4]:
        lines = [points(path)[::4] for path in drawing.targets + drawing.distractors]
        for place, line in enumerate(lines):
            for other in lines[:place]:
                assert np.sqrt(((line[:, None] - other[None]) ** 2).sum(-1).min()) > 1.2


@pytest.mark.parametrize("degrees", [0, 20, -135])
def test_turns_have_the_weight_of_their_cosine_squared(degrees):
    random, count, before = Random(0), 3000, math.radians(degrees)
    turns = Counter()
    for _ in range(count):
        path = pathfinder.Path.start((16, 16), before)
        assert path.extend(random, pathfinder.WALLS)
        turns[path.angle - before] += 1
    weights = {turn: math.cos(turn) ** 2 for turn in turns}
    assert len(turns) >= 7
    for turn, times in turns.items():
        assert math.cos(turn) > 0
        share = weights[turn] / sum(weights.values())
        assert times / count == pytest.approx(share, abs=0.03)


def test_an_image_depends_on_its_seed_part_and_place_alone(made):
    pixels, labels, _ = made[14]
    again, same = pathfinder.images(10, 0, "train", 14)
    assert (again == pixels[:10]).all()
    assert (same == labels[:10]).all()
    later, _ = pathfinder.images(4, 0, "train", 14, first=6)
    assert (later == pixels[6:10]).all()
    for seed, part in ((1, "train"), (0, "valid")):
        others, _ = pathfinder.images(10, seed, part, 14)
        assert (others != again).any(axis=(1, 2)).all()
    assert len({image.tobytes() for image in pixels}) == len(pixels)


def test_tokens_are_grey_values_plus_one(made):
    task = pathfinder.load(10, 5, 5)
    pixels, labels, _ = made[14]
    assert (task.train.ids == pixels[:10].reshape(10, -1).astype(int) + 1).all()
    assert (task.train.labels == labels[:10]).all()
    assert task.train.ids.min() == 1
    assert task.train.ids.max() == 256 < task.vocabulary
    assert task.classes == 2
    item = task.valid[0]
    assert "attention_mask" not in item
    assert item["input_ids"].shape == (1024,)


def test_workers_change_nothing(made, monkeypatch):
    monkeypatch.setattr(pathfinder, "SHARE", 4)
    task = pathfinder.load(10, 0, 3, workers=2)
    pixels, labels, _ = made[14]
    assert (task.train.ids == pixels[:10].reshape(10, -1).astype(int) + 1).all()
    assert (task.train.labels == labels[:10]).all()
    assert (len(task.valid), len(task.test)) == (0, 3)


def test_other_lengths_are_refused():
    with pytest.raises(ValueError, match="one of"):
        pathfinder.images(1, 0, "train", 7)
