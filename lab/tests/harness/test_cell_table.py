"""Tables of cells: what is bold, what is empty, what stands below without training."""

from lln_lab.experiments.cell_table import cell_table, clear_bests
from lln_lab.experiments.experiment import Column

ACCURACY = [Column(task, "accuracy", task) for task in ("toy", "other", "not run")]


def cell(method, seed, accuracy, task="toy"):
    place = {"method": method, "seed": seed, "task": task}
    return {"cell": place, "accuracy": accuracy, "f1": accuracy / 2, "loss": 1 - accuracy}


def trained(task="toy"):
    cells = [cell("softmax", seed, 0.9 + seed / 1000, task) for seed in range(3)]
    return cells + [cell("lln", seed, 0.5 + seed / 1000, task) for seed in range(3)]


def test_only_a_clear_best_is_bold_and_empty_cells_stay_empty():
    cells = [*trained(), cell("lln", 0, 0.7, task="other")]
    lines = cell_table(cells, [ACCURACY[1], ACCURACY[0]]).splitlines()
    assert lines[0] == "| attention | seeds | other | toy |"
    assert lines[2].endswith("|  | **90.1 ± 0.1** |")
    assert lines[3].endswith("| 3 | 70.0 (1) | 50.1 ± 0.1 |")
    ordered = cell_table(cells, ACCURACY)
    assert ordered.splitlines()[0] == "| attention | seeds | toy | other |"
    close = {"softmax": [0.9, 0.7, 0.8], "lln": [0.85, 0.75, 0.77]}
    assert clear_bests([close]) == [None]
    assert clear_bests([{"softmax": [0.9], "lln": [0.1, 0.2]}]) == [None]
    assert clear_bests([{"softmax": [0.9, 0.9], "lln": [0.9, 0.9]}]) == [None]
    assert clear_bests([{}, {"softmax": [0.9, 0.9], "lln": [0.8, 0.8]}]) == [None, "softmax"]


def test_less_loss_is_better_and_has_no_percent():
    lines = cell_table(trained(), [Column("toy", "loss", "toy")]).splitlines()
    assert lines[2].endswith("| **0.099 ± 0.001** |")


def test_bold_is_corrected_for_all_comparisons_of_a_table():
    # Welch's p of this pair is 0.021.
    pair = {"softmax": [0.90, 0.91, 0.92], "lln": [0.87, 0.88, 0.89]}
    assert clear_bests([pair]) == ["softmax"]
    # Three comparisons: 0.021 is above 0.05 / 3.
    assert clear_bests([pair] * 3) == [None] * 3
    # Holm's steps: once a clearer difference is held, the next has fewer beside it.
    clear = {"softmax": [0.90, 0.91, 0.92], "lln": [0.10, 0.11, 0.12]}
    assert clear_bests([clear, pair]) == ["softmax", "softmax"]
    # Every pair counts, not only those of the best row: it was chosen after a look at the rows.
    last = {
        name: [0.1, 0.11, 0.12 + place / 100] for place, name in enumerate(("elu", "relu", "rfa"))
    }
    assert clear_bests([pair | last]) == [None]


def test_two_measures_of_a_task_and_baselines_below():
    columns = [Column("toy", "accuracy", "toy"), Column("toy", "f1", "toy, F1")]
    known = {"toy": {"most frequent class": {"accuracy": 0.5}}, "never": {"x": {"accuracy": 1.0}}}
    lines = cell_table(trained(), columns, known).splitlines()
    assert lines[0] == "| attention | seeds | toy | toy, F1 |"
    assert "| 25.0 ± 0.1 |" in lines[3] or "| 25.1 ± 0.1 |" in lines[3]
    assert lines[4:] == ["| *most frequent class* |  | 50.0 |  |"]
