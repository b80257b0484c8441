"""Tasks are made once, and again when the code or the data have changed."""

import numpy as np
import pytest
from experiments import prepared
from experiments.experiment import Experiment, Plan
from experiments.hosts import Sizes
from experiments.prepared import prepared_task
from experiments.tasks.task import Examples, Task
from experiments.training import Recipe

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
    monkeypatch.setattr(prepared.experiments.tasks, "__path__", [str(sources)])
    for content in ("a = 1", "a = 1", "a = 2"):
        (sources / "made.py").write_text(content)
        prepared_task(experiment, "small", "trial", None, tmp_path / "work")
    assert len(made) == 2
