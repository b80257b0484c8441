"""Damaged files of results, measurements and texts end in one sentence that names them."""

import gzip
import json
import lzma

import numpy as np
import pytest
import torch
from tests.damage import JSON_FILES, OTHER_FILES, cases, check_refusal

from lln_lab.bench.attention_table import FORM, table_of
from lln_lab.bench.cases import Case
from lln_lab.bench.environment import IDENTITY
from lln_lab.bench.record import Record
from lln_lab.bench.result_rows import ROW_FORM, row_of
from lln_lab.demo.corpus import Corpus
from lln_lab.experiments import cells, cost, prepared, table2
from lln_lab.experiments.cells import Cell
from lln_lab.experiments.tasks.masked_text import FreshlyHidden, TokenIds
from lln_lab.experiments.tasks.task import Examples, Task
from lln_lab.figures.single_head import QUICK, Run
from lln_lab.inspection.saved import read_study
from lln_lab.saved_data import read_arrays
from lln_lab.texts import read_lines
from lln_lab.training_log.run_log import RunLog, read_records


def study(folder):
    path = folder / "lln-inspect.json"
    number = [[0.5, None]]
    head = {"layer": 0, "head": 1, "why": "it is the last"}
    shape = ("quantiles", "normal_quantiles", "softmax_histogram", "lln_histogram")
    layer = {"name": "a", "kind": "self", "heads": 2, "head_width": 4, "queries": 8, "keys": 8}
    content = {
        "model": "m", "architecture": "M", "text": "t", "tokens": 8, "samples": 1,
        "complete": True, "seconds": 1.0, "environment": {}, "findings": [],
        "layers": [layer | {"is_causal": None, "problem": None, "no_lln_because": None}],
        "values": {"entropy": number, "temperature": number},
        "chosen_heads": [head | {name: [0.0, 1.0] for name in shape}],
    }  # fmt: skip
    path.write_text(json.dumps(content))
    return path, lambda: read_study(path)


def bench(folder):
    path = folder / "results.json"
    case = Case("lln", 1, 2, 16, 8, "float32", False)
    environment = {"command": "lln bench", "busy_cores": 0.1} | dict.fromkeys(IDENTITY, "same")
    form = {"cases": [ROW_FORM | FORM]}
    record = Record(path, "attention", environment, form=form)
    times = {"milliseconds": 2.0, "milliseconds_quartiles": [1.0, 3.0], "floors": 4.0}
    record.add(row_of(case, status="timed", **times))

    def read():
        found = Record(path, "attention", environment, resume=True, form=form)
        assert table_of(found.rows)

    return path, read


def run_log(folder):
    with RunLog(folder, tensorboard=False) as log:
        log.write({"step": 1, "layers": {"a": [0.5]}}, {})
    path = folder / "concentration.jsonl"
    return path, lambda: read_records(path)


def one_training(folder):
    path = folder / "figure.pt"
    text = torch.arange(5000, dtype=torch.uint8)
    run = Run(QUICK, Corpus("bytes", "a tenth", text, text[:2000]))
    run.records = [run._measure()]
    run.save(path)
    return path, lambda: run.resume(path)


def one_cell(folder):
    cell = Cell("trial", "small", "task", "lln", 0)
    cells.write(cell, {"a": 1}, {"setup": {"device": "d"}}, folder)
    return cell.path(folder), lambda: cells.read_all(folder, "trial", "small")


def costs(folder):
    path = folder / "small-costs.json"
    found = {"milliseconds": 1.0, "peak_mib": 3, "setup": {"device": "d", "commit": "c"}}
    path.write_text(json.dumps({"costs": {"task": {"lln": found}}}))
    return path, lambda: cost._read(path)


def second_table(folder):
    path = folder / "table2" / "small.json"
    path.parent.mkdir()
    row = {"name": "a", "status": "timed", "part": "batch 1", "system": "lln", "batch": 1}
    content = {
        "environment": {"device": "d", "commit": "c", "command": "w"},
        "cases": [row | {"tokens": 64, "milliseconds": 3.0, "peak_bytes": 5.0}],
    }
    path.write_text(json.dumps(content))
    return path, lambda: table2.report_table2("small", folder)


def kept_task(folder):
    path = folder / "kept.npz"
    ids = np.arange(8).reshape(2, 4)
    code = TokenIds(9, 7, 8, (1, 7))
    train, rest = FreshlyHidden(ids, code, 0.15), Examples(ids, ids[:, 0], ids[:, 1])
    with path.open("wb") as file:
        np.savez(file, **prepared._arrays_of(Task("a", "b", 2, 9, train, rest, rest)))
    return path, lambda: prepared._read(path)


def arrays(folder):
    path = folder / "train.npz"
    np.savez(path, images=np.ones((3, 4)))
    return path, lambda: read_arrays(path, ("images",), "copy it again")


def packed(opener, end):
    def make(folder):
        path = folder / f"text.txt{end}"
        with opener(path, "wb") as file:
            file.write("Wörter und Zeilen\n".encode() * 300)
        return path, lambda: read_lines(path, "--text")

    return make


MADE = {
    "inspect": study,
    "bench": bench,
    "run log": run_log,
    "cell": one_cell,
    "costs": costs,
    "table 2": second_table,
    "figure 1": one_training,
    "kept task": kept_task,
    "arrays": arrays,
    "xz": packed(lzma.open, ".xz"),
    "gz": packed(gzip.open, ".gz"),
}
AS_JSON = ("inspect", "bench", "run log", "cell", "costs", "table 2")
# An empty gz file is an empty text.
ENTRIES = {name: JSON_FILES if name in AS_JSON else OTHER_FILES for name in MADE}
ENTRIES["gz"] = [name for name in OTHER_FILES if name != "empty"]


@pytest.mark.parametrize(("entry", "damage"), cases(ENTRIES))
def test_a_damaged_file_is_one_sentence(entry, damage, tmp_path):
    path, read = MADE[entry](tmp_path)
    read()
    # What has no end in a log was being written, and is left out.
    check_refusal(path, damage, read, b"\n" if entry == "run log" else b"")
