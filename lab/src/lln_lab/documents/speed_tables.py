"""The tables of README and docs, as Markdown."""

from __future__ import annotations

from lln_lab.bench.compare import fastest
from lln_lab.bench.operations import OPERATIONS
from lln_lab.bench.result_rows import Row
from lln_lab.bench.roberta import SYSTEMS
from lln_lab.bench.roberta_table import as_milliseconds, table_of, title_of
from lln_lab.documents.targets import GRAPH, PYTHON, main_rows
from lln_lab.markdown import source, table

CPU_COLUMNS = ("sdpa", "lln", "lln_matched", "lln_diag")
PASSES = ((False, "forward"), (True, "fwd + bwd"))


def cpu_table(results: dict) -> str:
    """Milliseconds, and how many times faster than SDPA."""
    times = {
        (row["operation"], row["backward"], row["tokens"]): row.get("milliseconds")
        for row in results["cases"]
        if row["operation"] in CPU_COLUMNS
    }
    ours = ["LLN", "LLN matched", "LLN + Diag"]
    lines = []
    for tokens in sorted({tokens for _, _, tokens in times}):
        cells = [str(tokens)]
        for backward in (False, True):
            base = times.get(("sdpa", backward, tokens))
            for operation in CPU_COLUMNS:
                found = times.get((operation, backward, tokens))
                faster = f" ({base / found:.1f}×)" if base and found else ""
                if found is None:
                    cells.append("")
                else:
                    cells.append(f"{found:.1f}{'' if operation == 'sdpa' else faster}")
        lines.append(cells)
    environment = results["environment"]
    caption = (
        f"Milliseconds (times faster than SDPA) on {environment['device']}, "
        f"{environment['threads']} threads, float32, B = 1, H = 12, D = 64, torch "
        f"{environment['torch']}{_passes(environment)}; {source(environment)}."
    )
    return table(["N", "SDPA", *ours, "SDPA fwd+bwd", *ours], lines, caption)


def _passes(environment: dict) -> str:
    return ", compiled passes" if environment.get("cpu_passes") == "compiled" else ""


def causal_cpu_table(plain: dict, compiled: dict) -> str:
    """Causal LLN by PyTorch and by compiled passes, beside causal SDPA of the same run."""
    times = {
        (name, row["operation"], row["backward"], row["tokens"]): row.get("milliseconds")
        for name, results in (("plain", plain), ("compiled", compiled))
        for row in results["cases"]
        if row["operation"] in ("sdpa_causal", "lln_causal")
    }
    lines = []
    for tokens in sorted({tokens for *_, tokens in times}):
        cells = [str(tokens)]
        for backward in (False, True):
            cells.append(_short(times.get(("compiled", "sdpa_causal", backward, tokens))))
            for name in ("plain", "compiled"):
                base = times.get((name, "sdpa_causal", backward, tokens))
                found = times.get((name, "lln_causal", backward, tokens))
                faster = f" ({base / found:.1f}×)" if base and found else ""
                cells.append(f"{_short(found)}{faster}")
        lines.append(cells)
    ours = ["LLN", "LLN compiled"]
    environment, before = compiled["environment"], plain["environment"]["commit"][:10]
    same = environment["commit"].startswith(before)
    caption = (
        f"Milliseconds (times faster than causal SDPA in the same run) on {environment['device']}, "
        f"{environment['threads']} threads, float32, B = 1, H = 12, D = 64, torch "
        f"{environment['torch']}; {source(environment)}, with and without compiled passes"
        f"{'' if same else f' (commit `{before}`)'}."
    )
    return table(["N", "SDPA", *ours, "SDPA fwd+bwd", *ours], lines, caption)


def trees_table(results: dict) -> str:
    """Every call of `lln_lab.benchmarks.two_trees` with the older and the newer package."""
    before, after = results["milliseconds"]["old"], results["milliseconds"]["new"]
    lines = []
    for kind, factor, unit in (("graph", 1, "ms"), ("host", 1000, "µs")):
        names = dict.fromkeys(
            name.removeprefix(f"{kind} ").removesuffix(" forward")
            for name in after
            if name.startswith(f"{kind} ") and name.endswith(" forward")
        )
        for name in names:
            cells = [_call(name), "GPU" if kind == "graph" else "host"]
            for what in ("forward", "forward + backward"):
                old, new = (tree[f"{kind} {name} {what}"] * factor for tree in (before, after))
                number = "{:.3f}" if unit == "ms" else "{:.0f}"
                cells += [f"{number.format(old)} {unit}", f"{number.format(new)} {unit}"]
                cells.append(f"{new / old:.2f}")
            lines.append(cells)
    old, new = results["commits"]
    caption = (
        "65,536 tokens (host: one sequence of 512), H = 12; bfloat16, D = 64, α and β given and "
        "blocks of as many tokens as a head has channels, where a row does not say otherwise. "
        "*GPU*: replayed as a CUDA graph; *host*: what the host spends on a call from Python. "
        f"Softmax is cuDNN's. {results['device']}, torch {results['torch']}; made by "
        f"`{results['command']}`, commits `{old}` and `{new}`."
    )
    heads = ["call", "time of", "before", "after", "ratio"]
    return table([*heads, *(f"{head}, fwd+bwd" for head in heads[2:])], lines, caption)


def _call(name: str) -> str:
    """From "lln_diag_64 D = 32 4096" to "LLN + Diag, blocks of 64, D = 32, N = 4,096"."""
    kind, *words = name.split()
    title = {
        "lln": "LLN",
        "lln_diag": "LLN + Diag",
        "lln_diag_64": "LLN + Diag, blocks of 64",
        "diag": "Diag alone",
        "softmax": "softmax",
    }[kind]
    width = " ".join(words[:-1])
    return ", ".join(part for part in (title, width, f"N = {int(words[-1]):,}") if part)


def fla_table(results: dict) -> str:
    """Causal LLN and flash-linear-attention, replayed as CUDA graphs."""
    names = ("lln_causal", "fla_causal_raw", "fla_causal")
    times = {
        (row["operation"], row["backward"], row["tokens"]): row.get(GRAPH)
        for row in results["cases"]
        if row["operation"] in names
    }
    titles = dict(zip(names, ("LLN", "fla, sums alone", "fla, normalised"), strict=True))
    # A run need not have every column.
    columns = [
        (name, backward)
        for backward in (False, True)
        for name in names
        if any(key[:2] == (name, backward) for key in times)
    ]
    lines = []
    for tokens in sorted({tokens for *_, tokens in times}):
        cells = [str(tokens)]
        for name, backward in columns:
            own, found = (times.get((key, backward, tokens)) for key in (names[0], name))
            share = f" ({own / found:.2f})" if own and found and name != names[0] else ""
            cells.append("" if found is None else f"{found:.3f}{share}")
        lines.append(cells)
    heads = [titles[name] + (", fwd+bwd" if backward else "") for name, backward in columns]
    environment = results["environment"]
    caption = (
        "Milliseconds of causal attention as CUDA graphs (in brackets the share that LLN takes), "
        f"bfloat16, 65,536 tokens, H = 12, D = 64. {environment['device']}, torch "
        f"{environment['torch']}, triton {environment['triton']}; {source(environment)}."
    )
    return table(["N", *heads], lines, caption)


def speed_summary(results: dict, rows: list[Row], lengths: tuple[int, ...], setting: str) -> str:
    """The few lines that README shows of a device, all called from Python.

    Args:
        results: Content of a results file.
        rows: Those of its cases to choose from, one per operation, pass and length.
        lengths: The lengths to show.
        setting: What the caption says about shapes.
    """
    heads = ["N"]
    for _, what in PASSES:
        heads += [f"softmax, {what}", "LLN", "LLN + Diag"]
    lines = []
    for tokens in lengths:
        cells = [f"{tokens:,}"]
        for backward, _ in PASSES:
            beside = [row for row in rows if (row["tokens"], row["backward"]) == (tokens, backward)]
            best = fastest(beside, PYTHON, "bidirectional")
            cells.append(_short(best))
            for name in ("lln", "lln_diag"):
                found = [row.get(PYTHON) for row in beside if row["operation"] == name]
                own = found[0] if found else None
                faster = f" ({best / own:.1f}×)" if best and own else ""
                cells.append(f"{_short(own)}{faster}")
        lines.append(cells)
    environment = results["environment"]
    caption = (
        f"Milliseconds (times faster than softmax), {setting}, α and β given. "
        f"{environment['device']}, torch {environment['torch']}; {source(environment)}."
    )
    return table(heads, lines, caption)


def _short(milliseconds: float | None) -> str:
    """Three digits or so."""
    if milliseconds is None:
        return ""
    return f"{milliseconds:,.{2 if milliseconds < 10 else 1 if milliseconds < 100 else 0}f}"


def gpu_table(results: dict) -> str:
    """GPU time and floors, replayed as a CUDA graph and called from Python."""
    rows = {(row["operation"], row["backward"], row["tokens"]): row for row in main_rows(results)}
    heads = ["N", "pass", "best softmax", "LLN", "LLN + Diag"]
    heads += ["from Python: best softmax", "LLN", "LLN + Diag"]
    lines = []
    lengths = sorted({n for name, _, n in rows if name in ("lln", "lln_diag")})
    for backward, what in PASSES:
        for tokens in lengths:
            cells = [str(tokens), what]
            for field, floors in ((GRAPH, "graph_floors"), (PYTHON, "floors")):
                beside = [row for (_, b, n), row in rows.items() if (b, n) == (backward, tokens)]
                best = fastest(beside, field, "bidirectional")
                cells.append("" if best is None else f"{best:.3f}")
                for name in ("lln", "lln_diag"):
                    cells.append(_cell(rows.get((name, backward, tokens)), field, floors, best))
            lines.append(cells)
    environment = results["environment"]
    caption = (
        "Milliseconds (times faster than the better of flash and cuDNN; floors), α and β given: on "
        f"the left replayed as a CUDA graph, on the right called from Python. "
        f"{environment['device']}, torch {environment['torch']}, triton {environment['triton']}, "
        f"copy {results['copy_terabytes_per_second']:.2f} TB/s; {source(environment)}."
    )
    return table(heads, lines, caption)


def gpu_other_table(results: dict) -> str:
    """Every GPU case that is not in the main table."""
    main = ("lln", "lln_diag", "sdpa_flash", "sdpa_cudnn")
    return _cases(results, {row["name"] for row in main_rows(results) if row["operation"] in main})


def _cases(results: dict, shown: set[str]) -> str:
    """Every case but those shown elsewhere."""
    heads = ["operation", "pass", "B", "N", "D", "graph ms", "floors", "ms", "floors"]
    heads += ["vs best softmax", "vs compiled", "vs fla", "memory"]
    lines = []
    for row in results["cases"]:
        if row["name"] in shown:
            continue
        numbers = [
            (GRAPH, "{:.3f}"),
            ("graph_floors", "{:.2f}"),
            (PYTHON, "{:.3f}"),
            ("floors", "{:.2f}"),
            ("graph_softmax_ratio", "{:.2f}×"),
            ("graph_compiled_ratio", "{:.2f}×"),
            ("graph_fla_ratio", "{:.2f}×"),
            ("memory_ratio", "{:.2f}×"),
        ]
        cells = [
            OPERATIONS[row["operation"]].label,
            "fwd + bwd" if row["backward"] else "forward",
            *(str(row[name]) for name in ("batch", "tokens", "width")),
            *("" if row.get(name) is None else form.format(row[name]) for name, form in numbers),
        ]
        if row.get("milliseconds") is None:
            cells[5] = row.get("status", "not right")
        lines.append(cells)
    return table(heads, lines)


# What the summary of the training steps shows.
SUMMARISED = ("softmax_sdpa", "lln", "lln_diag", "diag")


def roberta_table(results: dict, part: str) -> str:
    """One part of the table of training steps."""
    heads, cells = table_of(results["cases"], part)
    if not cells:
        return "Not measured."
    environment = results["environment"]
    caption = (
        f"{title_of(results['cases'], part)}: "
        f"{'' if part == 'graph' else 'GB at peak and '}milliseconds, forward and backward in "
        f"bfloat16 by autocast and AdamW. {environment['device']}, torch {environment['torch']}; "
        f"{source(environment)}. An empty cell was not run."
    )
    return table(heads, cells, caption)


def roberta_summary(parts: list[tuple[dict, str]], lengths: tuple[int, ...]) -> str:
    """Milliseconds of a training step at some lengths, parts side by side."""
    lines: list[list[str]] = [["ms per step"]]
    lines += [[SYSTEMS[name][0]] for name in SUMMARISED]
    for results, part in parts:
        rows = [row for row in results["cases"] if row["part"] == part]
        times = {(row["system"], row["tokens"]): row.get("milliseconds") for row in rows}
        filled = max((row["batch"] * row["tokens"] for row in rows), default=0)
        titles = {"batch 1": "batch 1", "graph": "as a CUDA graph", "filled": f"{filled:,} tokens"}
        lines[0] += [f"{titles[part]}, N = {n:,}" for n in lengths]
        for name, line in zip(SUMMARISED, lines[1:], strict=True):
            for tokens in lengths:
                own, base = (times.get((key, tokens)) for key in (name, "softmax_sdpa"))
                faster = f" ({base / own:.2f}×)" if own and base and name != "softmax_sdpa" else ""
                line.append(f"{as_milliseconds(own)}{faster}" if own else "")
    environments = [results["environment"] for results, _ in parts]
    sources = dict.fromkeys(source(environment) for environment in environments)
    machine = environments[0]
    caption = (
        "Milliseconds (times faster than SDPA), forward and backward in bfloat16 by autocast "
        f"and AdamW; {machine['device']}, torch {machine['torch']}; {'; '.join(sources)}."
    )
    return table(lines[0], lines[1:], caption)


def _cell(row: dict | None, field: str, floors: str, best: float | None) -> str:
    """Time, times faster than softmax, floors; a case without a time says why."""
    if row is None:
        return ""
    if row.get(field) is None:
        return "" if row.get("status") == "timed" else row.get("status", "")
    notes = [f"{best / row[field]:.1f}×"] if best is not None else []
    notes += [f"{row[floors]:.2f}"] if row.get(floors) is not None else []
    return f"{row[field]:.3f}" + (f" ({'; '.join(notes)})" if notes else "")
