"""What a training step costs: time and memory of every method, alone on the device (Table 4).

Cells that are trained side by side slow each other down, so their seconds say little. Here one
method at a time takes the same batch through forward, backward and update. The paper's harness
counts seconds of a whole run with its validations; milliseconds per step are what is left of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lln.checks.reading import read_json
from lln.files import write_atomically
from lln.integrations.progress import progress_bar
from lln_lab.bench.environment import describe
from lln_lab.compact import compact_json
from lln_lab.experiments.cells import Cell
from lln_lab.experiments.experiment import Experiment
from lln_lab.experiments.hosts import started_host
from lln_lab.experiments.methods import Method, all_methods
from lln_lab.experiments.prepared import prepared_task
from lln_lab.experiments.tasks.task import as_batch
from lln_lab.markdown import commits_of, table

WARM_UP, MEASURED = 8, 30

_FORM = {
    "costs": {
        str: {
            str: {
                "milliseconds": float,
                "peak_mib": (int, None),
                "setup": {"device": str, "commit": str},
            }
        }
    }
}


def costs_path(experiment: Experiment, scale: str, out: Path) -> Path:
    """The file with the costs of an experiment."""
    return out / experiment.name / f"{scale}-costs.json"


def measure(
    experiment: Experiment,
    cells: list[Cell],
    *,
    data: Path | None,
    out: Path,
    work: Path,
    command: str,
    echo: Callable[[str], object] = print,
) -> int:
    """Measure what is not there yet; returns how many were measured. Seeds do not count.

    Args:
        experiment: Which.
        cells: Of it.
        data: The folder of real data.
        out: Where results are kept.
        work: Where prepared tasks are kept.
        command: What to type to repeat this.
        echo: Takes a line after every measurement.
    """
    path = costs_path(experiment, cells[0].scale, out)
    path.parent.mkdir(parents=True, exist_ok=True)
    setup = describe("cuda" if torch.cuda.is_available() else "cpu", command, echo)
    kept = _read(path) if path.exists() else {}
    wanted = dict.fromkeys((cell.task, cell.method) for cell in cells)
    waiting = [pair for pair in wanted if pair[1] not in kept.get(pair[0], {})]
    with progress_bar(time_left=True) as bar:
        line = bar.add_task("", total=max(len(waiting), 1))
        for name, method in waiting:
            bar.update(line, description=f"{name} {method}")
            found = step_cost(experiment, cells[0].scale, name, method, data, work)
            # Each with its own setup: a file may be filled on several days.
            kept.setdefault(name, {})[method] = found | {"setup": setup}
            write_atomically(path, compact_json({"costs": kept}))
            bar.advance(line)
            echo(f"{name} {method}: {_written(found, ' ms', ' MiB')}")
    return len(waiting)


def step_cost(
    experiment: Experiment, scale: str, name: str, method: str, data: Path | None, work: Path
) -> dict[str, Any]:
    """Median milliseconds of a step, and on a GPU the peak memory in MiB."""
    plan = experiment.plans[scale][name]
    task: Any = prepared_task(experiment, scale, name, data, work)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = started_host(Method.parse(method), plan.sizes, task, 0).to(device)
    indices = list(range(min(plan.recipe.batch, len(task.train))))
    batch = {k: v.to(device) for k, v in as_batch(task.train.__getitems__(indices)).items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.recipe.rate)
    kind = getattr(torch, plan.recipe.precision)
    scaler = torch.amp.GradScaler(device, enabled=kind == torch.float16)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(WARM_UP + MEASURED):
        begun = time.perf_counter()
        with torch.autocast(device, kind, enabled=kind != torch.float32):
            loss = model(**batch)["loss"]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    peak = torch.cuda.max_memory_allocated() >> 20 if device == "cuda" else None
    middle = statistics.median(times[WARM_UP:])
    return {"milliseconds": round(1e3 * middle, 3), "peak_mib": peak, "batch": len(indices)}


def cost_table(experiment: Experiment, scale: str, out: Path) -> str:
    """Methods by tasks, with where the numbers come from; empty if nothing was measured."""
    path = costs_path(experiment, scale, out)
    if not path.exists():
        return ""
    costs = _read(path)
    order = {name: place for place, name in enumerate(all_methods())}
    methods = {method for found in costs.values() for method in found}
    rows = [
        [Method.parse(method).title]
        + [_written(found[method]) if method in found else "" for found in costs.values()]
        for method in sorted(methods, key=lambda name: (order.get(name, len(order)), name))
    ]
    setups = [one["setup"] for found in costs.values() for one in found.values()]
    devices = ", ".join(sorted({setup["device"] for setup in setups}))
    return (
        f"{table(['attention', *costs], rows)}\n\nMilliseconds of a training step / MiB of peak "
        f"memory, alone on the device. {devices}; {commits_of(setups, 'measurements')}; made by "
        f"python -m lln_lab.experiments time {experiment.name} --scale {scale}."
    )


def _read(path: Path) -> dict[str, Any]:
    return read_json(path, _FORM, "a file of costs", "remove it to measure again")["costs"]


def _written(found: dict[str, Any], of_time: str = "", of_memory: str = "") -> str:
    """Time and memory with these units; without, for a table whose caption has them."""
    memory = "" if found["peak_mib"] is None else f" / {found['peak_mib']:,}{of_memory}"
    return f"{found['milliseconds']:.1f}{of_time}{memory}"
