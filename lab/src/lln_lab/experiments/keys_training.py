"""Masked-language training from scratch: which attention learns what, exact keys among them.

    python -m lln_lab.experiments.keys_training prepare --data FOLDER --out TOKENS  # once
    python -m lln_lab.experiments.keys_training many --jobs 9 --tokens-folder TOKENS \\
        --out RESULTS --variant diag,diag/softmax,diag/half --seeds 0 1 2
    python -m lln_lab.experiments.keys_training report --out RESULTS

A variant is a kind of attention, or two that alternate (``diag/half``: diag in even layers), and
options (``+conv``, ``+noslots``, ``+keys128``); `keys_training_model` lists the kinds.
A seed fixes the first weights, the order of the data and the masks, the same for every variant.
Every variant and seed is one JSON file under RESULTS; what is there already is not run again.

Data: ``--data`` or ``LLN_DATA``, a folder with train.txt[.xz] and valid.txt[.xz].
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from lln.checks.reading import read_json
from lln.files import compact_json, write_atomically
from lln_lab.bench.environment import describe
from lln_lab.experiments.keys_training_data import (
    VALID_TOKENS,
    load_tokens,
    prepare,
    training_batches,
    validation_batches,
)
from lln_lab.experiments.keys_training_model import MaskedEncoder, ModelSizes, Variant
from lln_lab.experiments.side_by_side import Job, run_side_by_side
from lln_lab.markdown import table

# α, β and g are single numbers with far to go; weights are not.
SCALARS = ("alpha", "beta", "offset")
SCALAR_RATE = 10
LOG_EVERY = 100


@dataclass(frozen=True)
class KeysCell:
    """One training: everything that decides its result."""

    variant: str
    seed: int
    sizes: ModelSizes
    steps: int = 3000
    batch_tokens: int = 32_768
    valid_tokens: int = VALID_TOKENS
    rate: float = 1e-3
    warm_up: float = 0.1
    decay: float = 0.05
    bf16: bool = True
    compiled: bool = True

    @property
    def file_name(self) -> str:
        """Letters, digits, dots and dashes only, whatever the variant is called."""
        name = self.variant.replace("/", "-").replace("+", "_")
        keys = Variant.parse(self.variant).keys or self.sizes.keys
        return f"{name}.n{self.sizes.length}.k{keys}.t{self.steps}.seed{self.seed}.json"


# KeysCell


def optimizer_of(model: MaskedEncoder, cell: KeysCell, device: str) -> torch.optim.Optimizer:
    groups = {"matrices": [], "vectors": [], "scalars": []}
    for name, parameter in model.named_parameters():
        scalar = name.rpartition(".")[2] in SCALARS
        kind = "scalars" if scalar else "matrices" if parameter.dim() > 1 else "vectors"
        groups[kind].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": groups["matrices"], "weight_decay": cell.decay},
            {"params": groups["vectors"]},
            {"params": groups["scalars"], "lr": SCALAR_RATE * cell.rate},
        ],
        lr=cell.rate,
        betas=(0.9, 0.98),
        weight_decay=0.0,
        fused=device == "cuda",
    )


def rate_at(step: int, cell: KeysCell) -> float:
    """Share of the full rate: up in a line, down to a tenth in half a cosine."""
    rise = max(int(cell.warm_up * cell.steps), 1)
    if step < rise:
        return (step + 1) / rise
    done = (step - rise) / max(cell.steps - rise, 1)
    return 0.55 + 0.45 * math.cos(math.pi * done)


def validate(model: MaskedEncoder, cell: KeysCell, tokens: torch.Tensor) -> float:
    # Random keys are drawn here too.
    torch.manual_seed(0)
    # Not under no_grad: what was compiled for training serves here too.
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=cell.bf16):
        losses = [model(*batch).detach() for batch in validation_batches(cell, tokens)]
    return torch.stack(losses).mean().item()


def train(cell: KeysCell, folder: Path, device: str) -> dict:
    """Train one cell and measure it."""
    begun = time.perf_counter()
    torch.manual_seed(cell.seed)
    variant = Variant.parse(cell.variant)
    model = MaskedEncoder(cell.sizes, variant, cell.compiled).to(device)
    optimizer = optimizer_of(model, cell, device)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, cell))
    batches = training_batches(cell, load_tokens(folder, "train", device))
    curve, running, last, pace = [], torch.zeros((), device=device), 0, []
    since = time.perf_counter()
    for step in range(1, cell.steps + 1):
        with torch.autocast(device, torch.bfloat16, enabled=cell.bf16):
            loss = model(*next(batches))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        running += loss.detach()
        if step % LOG_EVERY == 0 or step == cell.steps:
            # The only place that waits for the device.
            curve.append([step, round(running.item() / (step - last), 4)])
            pace.append((time.perf_counter() - since) / (step - last) * 1000)
            print(f"{cell.variant} seed {cell.seed}: {step} {curve[-1][1]} {pace[-1]:.0f} ms")
            sys.stdout.flush()
            if not math.isfinite(curve[-1][1]):
                raise SystemExit(f"{cell.variant} seed {cell.seed}: the loss is not finite")
            running.zero_()
            last, since = step, time.perf_counter()
    loss = validate(model, cell, load_tokens(folder, "valid", device))
    return {
        "valid_loss": loss,
        "curve": curve,
        # The first stretch also compiles.
        "ms_per_step": statistics.median(pace[1:] or pace),
        "seconds": time.perf_counter() - begun,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "learned": {
            name: [round(number, 3) for number in parameter.flatten().tolist()]
            for name, parameter in model.named_parameters()
            if name.rpartition(".")[2] in SCALARS
        },
    }


# Commands


def is_finished(cell: KeysCell, folder: Path) -> bool:
    """Whether its result is there; another training under the same name is an error."""
    path = folder / cell.file_name
    if not path.exists():
        return False
    schema = {"config": {"compiled": object, "sizes": {"core": object}}}
    fix = "name another --out, or remove it"
    stored = read_json(path, schema, "the result of a training", fix)["config"]
    # How it is computed may differ, what is computed may not.
    for config in (stored, own := asdict(cell)):
        config.pop("compiled")
        config["sizes"].pop("core")
    if stored != own:
        raise SystemExit(f"{path} holds another training; name another --out")
    return True


def cells_of(options: argparse.Namespace) -> list[KeysCell]:
    """Seed by seed, so that time that runs out leaves whole comparisons."""
    path = options.tokens_folder / "about.json"
    about = read_json(path, {"vocabulary": int}, "what `prepare` writes", "run prepare again")
    heads = options.heads or max(options.width // 64, 1)
    sizes = ModelSizes(
        options.length,
        options.layers,
        options.width,
        heads,
        options.block,
        options.keys,
        about["vocabulary"],
        options.slot_shift,
        options.core,
    )
    shared = {
        name: getattr(options, name)
        for name in ("steps", "batch_tokens", "valid_tokens", "rate", "warm_up", "decay")
    }
    first = KeysCell("diag", 0, sizes, **shared, bf16=options.bf16, compiled=options.compile)
    return [
        replace(first, variant=variant, seed=seed)
        for seed in options.seeds
        for variant in options.variant
    ]


def without_folders(words: list[str]) -> list[str]:
    """The words of a command without its folders, which are those of one machine."""
    places = {"--tokens-folder": "TOKENS", "--out": "RESULTS"}
    return [places.get(flag, word) for flag, word in zip(["", *words], words, strict=False)]


def run(options: argparse.Namespace) -> None:
    torch.set_float32_matmul_precision("high")
    # One code object serves all kinds, in training and in validation.
    torch._dynamo.config.recompile_limit = 64
    command = " ".join(
        ["python -m lln_lab.experiments.keys_training", *without_folders(sys.argv[1:])]
    )
    for cell in cells_of(options):
        if is_finished(cell, options.out):
            continue
        if options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        result = train(cell, options.tokens_folder, options.device)
        result |= {"config": asdict(cell), "setup": describe(options.device, command)}
        write_atomically(options.out / cell.file_name, compact_json(result))
        print(f"{cell.variant} seed {cell.seed}: validation {result['valid_loss']:.4f}", flush=True)


def arguments_for(cell: KeysCell, options: argparse.Namespace) -> list[str]:
    """The command that runs one cell of these options."""
    words = [sys.executable, "-m", "lln_lab.experiments.keys_training", "run"]
    words += ["--variant", cell.variant, "--seeds", str(cell.seed)]
    for name, value in vars(options).items():
        if name in ("command", "function", "variant", "seeds", "jobs", "minutes"):
            continue
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif value is not None:
            words += [flag, str(value)]
    return words


def many(options: argparse.Namespace) -> None:
    """Run every cell in a process of its own, some at a time."""
    waiting = [cell for cell in cells_of(options) if not is_finished(cell, options.out)]
    jobs = [
        Job(
            f"{cell.variant} seed {cell.seed}",
            arguments_for(cell, options),
            options.out / "logs" / f"{cell.file_name}.log",
        )
        for cell in waiting
    ]
    failed = run_side_by_side(jobs, options.jobs, options.minutes)
    if failed:
        raise SystemExit("failed:\n" + "\n".join(failed))


def report(options: argparse.Namespace) -> None:
    print(report_table([json.loads(p.read_text("utf-8")) for p in options.out.glob("*.json")]))


def report_table(results: list[dict], with_cost: bool = True) -> str:
    """Mean ± standard deviation over the seeds, and how far from diag to diag/softmax that is.

    Times and memory are left out without `with_cost`: side by side on one GPU they say little.
    """
    groups: dict[tuple, list[dict]] = {}
    for result in results:
        config = result["config"]
        keys = Variant.parse(config["variant"]).keys or config["sizes"]["keys"]
        place = (config["sizes"]["length"], config["steps"], config["variant"], keys)
        groups.setdefault(place, []).append(result)
    means = {
        place: statistics.mean(one["valid_loss"] for one in group)
        for place, group in groups.items()
    }

    def end(length: int, steps: int, name: str) -> float:
        found = [mean for place, mean in means.items() if place[:3] == (length, steps, name)]
        return found[0] if found else math.nan

    rows = []
    for place in sorted(groups, key=lambda place: (place[:2], means[place])):
        length, steps, name, keys = place
        losses = [one["valid_loss"] for one in groups[place]]
        spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
        diag, softmax = end(length, steps, "diag"), end(length, steps, "diag/softmax")
        way = (diag - means[place]) / (diag - softmax) if diag != softmax else math.nan
        pace = statistics.median(one["ms_per_step"] for one in groups[place])
        peak = max(one["peak_gib"] or 0 for one in groups[place])
        cells = [name, keys, length, steps, len(losses), f"{means[place]:.3f}{spread}"]
        cells += ["" if math.isnan(way) else f"{way:.0%}", f"{pace:.1f}", f"{peak:.1f}"]
        rows.append([str(cell) for cell in cells])
    head = "layers,K,tokens,steps,seeds,validation loss,diag → diag/softmax,ms per step,GiB"
    shown = 9 if with_cost else 7
    return table(head.split(",")[:shown], [row[:shown] for row in rows])


def add_training_options(parser: argparse.ArgumentParser) -> None:
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--tokens-folder", type=Path, required=True, help="what prepare wrote")
    parser.add_argument("--variant", type=lambda text: text.split(","), required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=KeysCell.steps)
    parser.add_argument("--batch-tokens", type=int, default=KeysCell.batch_tokens)
    parser.add_argument("--valid-tokens", type=int, default=KeysCell.valid_tokens)
    parser.add_argument("--rate", type=float, default=KeysCell.rate)
    parser.add_argument(
        "--warm-up", type=float, default=KeysCell.warm_up, help="share of the steps"
    )
    parser.add_argument("--decay", type=float, default=KeysCell.decay)
    for name in ("length", "layers", "width", "block", "keys"):
        parser.add_argument(f"--{name}", type=int, default=getattr(ModelSizes, name))
    parser.add_argument("--heads", type=int, help="default: of 64 features each")
    parser.add_argument("--slot-shift", type=float, default=ModelSizes.slot_shift)
    parser.add_argument("--core", choices=["dense", "sdpa"], default=ModelSizes.core)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=on_gpu)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=on_gpu)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare", help="tokenize the text")
    data = os.environ.get("LLN_DATA")
    one.add_argument("--data", type=Path, default=data, required=data is None)
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--vocabulary", type=int, default=8192)
    one.set_defaults(function=prepare)
    one = commands.add_parser("run", help="train one cell after another")
    add_training_options(one)
    one.set_defaults(function=run)
    one = commands.add_parser("many", help="train cells side by side, each in its process")
    add_training_options(one)
    one.add_argument("--jobs", type=int, default=9)
    one.add_argument("--minutes", type=float, help="begin no cell that would end after these")
    one.set_defaults(function=many)
    one = commands.add_parser("report", help="print a table")
    one.add_argument("--out", type=Path, required=True)
    one.set_defaults(function=report)
    options = parser.parse_args(words)
    options.function(options)


if __name__ == "__main__":
    main()
