"""Tasks are made once, and again when the code or the data have changed."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from lln.errors import InvalidInputError
from lln_lab.experiments import prepared
from lln_lab.experiments.experiment import Experiment, Plan
from lln_lab.experiments.hosts import Sizes
from lln_lab.experiments.prepared import prepared_task
from lln_lab.experiments.tasks.masked_text import FreshlyHidden, TextCode
from lln_lab.experiments.tasks.recall import RecallTask
from lln_lab.experiments.tasks.task import Examples, Task
from lln_lab.experiments.training import Recipe

SIZES = Sizes(layers=1, width=8, heads=1, feed_forward=8, length=4)


@pytest.fixture
def trial():
    """An experiment that counts how often its task is made."""
    made = []

    def load(data):
        made.append(data)
        part = Examples(np.full((2, 4), len(made)), np.zeros(2, dtype=np.int64))
        return Task("trial", "a trial", 2, 9, part, part, part)

    plans = {"small": {"trial": Plan(SIZES, Recipe(1, 2, 1e-3), load)}}
    one = Experiment("trial", "A trial", plans, ("lln",), needs_data=frozenset({"trial"}))
    return one, made


def test_a_task_is_made_once(trial, tmp_path):
    experiment, made = trial
    first, second = (
        prepared_task(experiment, "small", "trial", tmp_path / "data", tmp_path / "work")
        for _ in range(2)
    )
    assert len(made) == 1
    assert np.array_equal(first.train.ids, second.train.ids)
    assert second.title == "a trial"


def test_a_kept_task_runs_no_code(trial, tmp_path):
    """Somebody else may have placed the file: it is data, or it is refused."""
    experiment, made = trial
    prepared_task(experiment, "small", "trial", None, tmp_path)
    (kept,) = (tmp_path / "tasks").iterdir()
    seen = tmp_path / "seen"
    program = pickle.dumps(Program(seen))
    for pickled in (True, False):
        if pickled:
            kept.write_bytes(program)
        else:
            np.savez(kept, about=np.array([Program(seen)], dtype=object))
        with pytest.raises(InvalidInputError, match="remove it, and it is made again"):
            prepared_task(experiment, "small", "trial", None, tmp_path)
    assert not seen.exists()
    assert len(made) == 1


class Program:
    """What a pickle may do when it is opened."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return type(self.path).touch, (self.path,)


def test_masked_text_is_kept_without_its_tokenizer(trial, tmp_path):
    experiment, _ = trial
    ids = np.arange(1, 17, dtype=np.int32).reshape(2, 8)
    code = TextCode(vocabulary=20, mask=18, end=19, plain=(1, 18), encode=len)
    part = Examples(ids, ids[:, 0])
    made = RecallTask("a", "b", 2, 20, FreshlyHidden(ids, code, 0.5), part, part, chance=0.5)
    plans = {"small": {"trial": replace(experiment.plans["small"]["trial"], load=lambda _: made)}}
    experiment = replace(experiment, plans=plans)
    first, second = (prepared_task(experiment, "small", "trial", None, tmp_path) for _ in range(2))
    assert second is not first
    assert (type(second), second.chance) == (RecallTask, 0.5)
    for name, side in first.train.__getitems__([1, 0]).items():
        assert torch.equal(second.train.__getitems__([1, 0])[name], side)
    assert second.train.ids.dtype == np.int32


def test_other_data_make_another_task(trial, tmp_path):
    experiment, made = trial
    data = tmp_path / "data"
    data.mkdir()
    for content in ("one", "one", "longer"):
        (data / "train.txt").write_text(content)
        found = prepared_task(experiment, "small", "trial", data, tmp_path / "work")
    assert len(made) == 2
    assert (found.train.ids == 2).all()
    # The one before is not kept.
    assert len(list((tmp_path / "work" / "tasks").iterdir())) == 1


def test_other_code_makes_another_task(trial, tmp_path, monkeypatch):
    experiment, made = trial
    sources = tmp_path / "sources"
    sources.mkdir()
    monkeypatch.setattr(prepared.lln_lab.experiments.tasks, "__path__", [str(sources)])
    for content in ("a = 1", "a = 1", "a = 2"):
        (sources / "made.py").write_text(content)
        prepared_task(experiment, "small", "trial", None, tmp_path / "work")
    assert len(made) == 2
