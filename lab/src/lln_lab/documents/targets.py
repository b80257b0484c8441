"""What is asked of the kernels, and whether the measurements meet it, line by line.

All on one GPU, bfloat16, H = 12, B·N = 65,536, α and β given, D = 64 unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lln_lab.bench.compare import fastest
from lln_lab.bench.result_rows import Row
from lln_lab.markdown import table

TOKENS = 65536
GRAPH, PYTHON = "graph_milliseconds", "milliseconds"


@dataclass(frozen=True)
class Target:
    """One line of the table.

    Attributes:
        asked: The words.
        measure: Rows and field of the time → the worst number found; None if nothing was measured.
        limit: What it may be.
        at_least: Whether the limit is a lower one.
        form: How to print the number.
        width: The head width it speaks of.
        timed: Whether there are two answers, as a CUDA graph and called from Python; else the
            second only.
        by_fla: Whether it speaks of flash-linear-attention, which has a run of its own.
    """

    asked: str
    measure: Callable[[list[Row], str], float | None]
    limit: float
    at_least: bool = False
    form: str = "{:.2f}"
    width: int = 64
    timed: bool = True
    by_fla: bool = False

    def verdict(self, found: float | None) -> str:
        """``"met"``, ``"missed"`` or, without a measurement, nothing."""
        if found is None:
            return ""
        met = found > self.limit if self.at_least else found <= self.limit
        return "met" if met else "missed"


def main_rows(results: dict, width: int = 64) -> list[Row]:
    """The rows of one head width that the targets speak of."""
    return [
        row
        for row in results["cases"]
        if row["width"] == width and row["batch"] * row["tokens"] == TOKENS
    ]


def targets_table(results: dict, fla: dict | None = None) -> str:
    """Markdown: asked, measured as a CUDA graph and from Python, met or missed.

    Args:
        results: Content of a results file.
        fla: The same of a run with flash-linear-attention; None = the same run.
    """
    heads = ["what is asked, at every N measured", "as CUDA graph", "", "called from Python", ""]
    lines = []
    for target in TARGETS:
        cells = [target.asked] if target.timed else [target.asked, "", ""]
        for field in (GRAPH, PYTHON) if target.timed else (PYTHON,):
            run = fla if fla and target.by_fla else results
            found = target.measure(main_rows(run, target.width), field)
            cells += ["" if found is None else target.form.format(found), target.verdict(found)]
        lines.append(cells)
    return table(heads, lines, "The worst of all lengths; an empty cell was not measured.")


def _worst(entry: str, operation: str, backward: bool) -> Callable[[list[Row], str], float | None]:
    """The largest entry of an operation's rows; the graph's own where that is what is timed."""

    def worst(rows: list[Row], field: str) -> float | None:
        name = entry if field == PYTHON else f"graph_{entry}"
        chosen = (operation, backward)
        own = [row for row in rows if (row["operation"], row["backward"]) == chosen]
        return _largest(row.get(name) for row in own)

    return worst


def _matching_units(rows: list[Row], field: str) -> float | None:
    """Units of time that matching on the fly adds, at most."""
    added = []
    for row in _of(rows, "lln", field):
        unit = _unit(row, field)
        beside = _of(_beside(rows, row), "lln_matched", field)
        if unit and beside:
            added.append((beside[0][field] - row[field]) / unit)
    return _largest(added)


def _unit(row: Row, field: str) -> float | None:
    """Milliseconds of one unit, from the row's floors: LLN's fewest units are 4 and 11."""
    floors = row.get("graph_floors" if field == GRAPH else "floors")
    return row[field] / floors / (11 if row["backward"] else 4) if floors else None


def _versus_softmax(operation: str, group: str, least: int) -> Callable[..., float | None]:
    def worst(rows: list[Row], field: str) -> float | None:
        ratios = []
        for row in _of(rows, operation, field):
            best = fastest(_beside(rows, row), field, group)
            if best is not None and row["tokens"] >= least:
                ratios.append(best / row[field])
        return min(ratios, default=None)

    return worst


def _versus(name: str) -> Callable[[list[Row], str], float | None]:
    """Causal LLN's time over a rival's, the largest."""

    def worst(rows: list[Row], field: str) -> float | None:
        return _largest(
            row[field] / rival[field]
            for row in _of(rows, "lln_causal", field)
            for rival in _of(_beside(rows, row), name, field)
        )

    return worst


def _backward_of_blocks(rows: list[Row], field: str) -> float | None:
    """The backward pass of causal LLN + Diag over causal LLN's, the largest."""

    def backwards(operation: str) -> dict[int, float]:
        own = _of(rows, operation, field)
        forward = {row["tokens"]: row[field] for row in own if not row["backward"]}
        both = {row["tokens"]: row[field] for row in own if row["backward"]}
        return {tokens: both[tokens] - forward[tokens] for tokens in forward.keys() & both.keys()}

    plain, blocks = backwards("lln_causal"), backwards("lln_diag_causal")
    return _largest(blocks[tokens] / plain[tokens] for tokens in plain.keys() & blocks.keys())


def _of(rows: Iterable[Row], operation: str, field: str) -> list[Row]:
    return [r for r in rows if r["operation"] == operation and r.get(field) is not None]


def _beside(rows: Iterable[Row], row: Row) -> list[Row]:
    return [r for r in rows if (r["tokens"], r["backward"]) == (row["tokens"], row["backward"])]


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


TARGETS = (
    Target("LLN forward ≤ 1.35 floors", _worst("floors", "lln", False), 1.35),
    Target("LLN + Diag forward ≤ 1.4 floors", _worst("floors", "lln_diag", False), 1.4),
    Target("LLN forward + backward ≤ 1.6 floors", _worst("floors", "lln", True), 1.6),
    Target("LLN + Diag forward + backward ≤ 1.7 floors", _worst("floors", "lln_diag", True), 1.7),
    Target("matching on the fly adds ≤ 3 units", _matching_units, 3.0, form="{:.1f} units"),
    Target(
        "LLN + Diag faster than the best softmax from N = 512",
        _versus_softmax("lln_diag", "bidirectional", 512),
        1.0,
        at_least=True,
        form="{:.2f}×",
    ),
    Target(
        "causal LLN no slower than fla's `chunk_linear_attn`",
        _versus("fla_causal"),
        1.0,
        form="{:.2f} of its time",
        by_fla=True,
    ),
    Target(
        "… nor than 1.1 × its sums alone, without normaliser",
        _versus("fla_causal_raw"),
        1.1,
        form="{:.2f} of its time",
        by_fla=True,
    ),
    Target(
        "causal LLN faster than the best causal softmax from N = 2,048",
        _versus_softmax("lln_causal", "causal", 2048),
        1.0,
        at_least=True,
        form="{:.2f}×",
    ),
    Target(
        "causal LLN + Diag faster than the best causal softmax from N = 1,024",
        _versus_softmax("lln_diag_causal", "causal", 1024),
        1.0,
        at_least=True,
        form="{:.2f}×",
    ),
    Target(
        "… its backward pass ≤ 1.4 × causal LLN's",
        _backward_of_blocks,
        1.4,
        form="{:.2f} of its time",
    ),
    *(
        Target(
            f"D = {width}: {label} {'forward + backward' if backward else 'forward'} "
            f"≤ {limit} floors",
            _worst("floors", operation, backward),
            limit,
            width=width,
        )
        for width, label, operation, limits in (
            (32, "LLN", "lln", (1.35, 1.5)),
            (32, "LLN + Diag", "lln_diag", (1.35, 1.5)),
            (128, "LLN", "lln", (1.5, 1.8)),
            (128, "LLN + Diag, blocks of 64,", "lln_diag_64", (1.6, 2.0)),
        )
        for backward, limit in zip((False, True), limits, strict=True)
    ),
    *(
        Target(
            f"D = 128: {label} faster than the best softmax from N = 512",
            _versus_softmax(operation, "bidirectional", 512),
            1.0,
            at_least=True,
            form="{:.2f}×",
            width=128,
        )
        for label, operation in (("LLN", "lln"), ("LLN + Diag, blocks of 64,", "lln_diag_64"))
    ),
    Target(
        "LLN memory, fwd + bwd, ≤ 1.1 × tensors",
        _worst("memory_ratio", "lln", True),
        1.1,
        timed=False,
    ),
    Target(
        "LLN + Diag memory, fwd + bwd, ≤ 1.1 × tensors",
        _worst("memory_ratio", "lln_diag", True),
        1.1,
        timed=False,
    ),
)
