"""Copies of real sets for the data folder, from a stand-in for the package ``datasets``."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from lab.tests.tasks.data_files import is_one_sentence, own_copies, write_arrays
from PIL import Image

from lln.errors import InvalidInputError
from lln_lab.experiments.__main__ import main
from lln_lab.experiments.tasks.cats_dogs import cats_dogs
from lln_lab.experiments.tasks.copies import SOURCES, copy
from lln_lab.experiments.tasks.data_folder import Row
from lln_lab.experiments.tasks.glue import SETS, glue_rows
from lln_lab.experiments.tasks.lra_image import lra_image
from lln_lab.experiments.tasks.lra_text import lra_text
from lln_lab.experiments.tasks.masked_text import read_articles

pytestmark = own_copies


@pytest.fixture
def datasets(monkeypatch):
    """A package that makes rows up; it notes what it was asked for."""
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "0")
    module = ModuleType("datasets")
    module.config = SimpleNamespace(HF_DATASETS_OFFLINE=False)
    module.DownloadConfig = SimpleNamespace
    module.asked = []

    def load_dataset(*names, split, download_config):
        module.asked.append((names, split, download_config.local_files_only))
        first = 10 if split == "train" else 100
        greys = [Image.fromarray(np.full((40, 48, 3), first + i, np.uint8)) for i in range(40)]
        return [
            {
                "label": i % 2,
                "labels": i % 2,
                "text": f"{split}\twith \n tab {i}\n",
                "img": greys[i],
                "image": greys[i],
                **{column: f"{column} {i}" for known in SETS.values() for column in known.columns},
            }
            for i in range(40)
        ]

    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


@pytest.mark.parametrize("name", SOURCES)
def test_every_copy_is_read_by_its_loader(name, datasets, tmp_path):
    paths = copy(name, tmp_path)
    assert {path.name.partition(".")[0] for path in paths} == set(SOURCES[name].parts)
    if name in SETS:
        rows = glue_rows(tmp_path, name)
        assert len(rows.train) + len(rows.valid) == len(rows.test) == 40
        texts = tuple(f"{column} 3" for column in SETS[name].columns)
        assert Row(1, texts) in rows.test
    elif name == "imdb":
        task = lra_text(tmp_path, 64, 64)
        first = bytes((task.test.ids[0][: task.test.lengths[0]] - 1).tolist()).decode()
        assert first == "test with tab 0"
    elif name == "wikitext-2":
        assert "validation\twith" in read_articles(tmp_path, name, "valid")[0]
    elif name == "cifar10-gray":
        task = lra_image(tmp_path)
        assert (task.train.ids < 11 + 40).all()
        assert (task.test.ids == 101 + np.arange(40)[:, None]).all()
        assert task.test.labels.tolist() == [0, 1] * 20
    else:
        # The set has one part: every fifth row of it is the test, so both classes are in it.
        task = cats_dogs(tmp_path)
        assert task.test.images[:, 0, 0, 0].tolist() == [14, 19, 24, 29, 34, 39, 44, 49]
        assert set(task.test.labels.tolist()) == {0, 1}
        assert task.test.images.shape == (8, 64, 64, 3)
        assert len(task.train) + len(task.valid) == 32


def test_what_is_there_stays_and_the_network_is_used_only_if_asked(datasets, tmp_path, capsys):
    assert main(["copy", "rte", "--data", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("wrote") == 2
    assert [asked[2] for asked in datasets.asked] == [True, True]
    assert datasets.config.HF_DATASETS_OFFLINE
    (tmp_path / "rte/dev.tsv").unlink()
    kept = (tmp_path / "rte/train.tsv").stat().st_mtime_ns
    assert main(["copy", "rte", "--data", str(tmp_path), "--download"]) == 0
    assert datasets.asked[2:] == [(("glue", "rte"), "validation", False)]
    assert (tmp_path / "rte/train.tsv").stat().st_mtime_ns == kept


def test_refusals_say_what_to_do(datasets, tmp_path, monkeypatch, capsys):
    with pytest.raises(InvalidInputError, match="no set is called 'aan'"):
        copy("aan", tmp_path)
    monkeypatch.delenv("LLN_DATA", raising=False)
    assert main(["copy", "rte"]) == 2
    assert "--data FOLDER" in capsys.readouterr().err

    def offline(*_, **__):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(InvalidInputError, match=r"no copy of glue/rte \(offline\); add --download"):
        copy("rte", tmp_path)
    assert not (tmp_path / "rte").exists()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InvalidInputError, match="pip install datasets") as error:
        copy("rte", tmp_path)
    assert is_one_sentence(error)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((4, 32, 30), np.uint8), np.zeros(4, int), "must be uint8 of shape"),
        (np.zeros((4, 32, 32), np.float32), np.zeros(4, int), "must be uint8"),
        (np.zeros((4, 32, 32), np.uint8), np.full(4, 10), "from 0 to 9"),
    ],
)
def test_pictures_of_another_form_are_refused(tmp_path, images, labels, message):
    write_arrays(tmp_path / "cifar10-gray/train.npz", images=images, labels=labels)
    with pytest.raises(InvalidInputError, match=message) as error:
        lra_image(tmp_path)
    assert is_one_sentence(error)
