"""Masked-language training from scratch: which attention learns what, exact keys among them.

    python -m experiments.keys_training prepare --data FOLDER --out TOKENS     # once, on any CPU
    python -m experiments.keys_training many --jobs 9 --tokens-folder TOKENS --out RESULTS \\
        --variant diag,diag/softmax,diag/half --seeds 0 1 2
    python -m experiments.keys_training report --out RESULTS

A variant is a kind of attention, or two that alternate (``diag/half``: diag in even layers), and
options (``+conv``, ``+noslots``, ``+keys128``); `experiments.keys_training_model` lists the kinds.
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

import numpy as np
import torch

from experiments.keys_training_model import Encoder, Sizes, Variant
from experiments.side_by_side import Job, run_side_by_side
from experiments.tables import table
from experiments.tasks.data_folder import text_file
from lln.files import compact_json, read_utf8, write_atomically
from lln.studies.bench.environment import describe

MASK = 0
SHARE_MASKED = 0.15
VALID_TOKENS = 524_288
# α, β and g are single numbers with far to go; weights are not.
SCALARS = ("alpha", "beta", "offset")
SCALAR_RATE = 10
LOG_EVERY = 100


@dataclass(frozen=True)
class Cell:
    """One training: everything that decides its result."""

    variant: str
    seed: int
    sizes: Sizes
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


# Data


def articles(folder: Path, part: str) -> list[str]:
    """The articles of a part, each with its title and its line breaks."""
    text = read_utf8(text_file(folder, part), "--data")
    return [article for article in text.split("\n\n") if article.strip()]


def prepare(options: argparse.Namespace) -> None:
    """Train the tokenizer on the training text and write both parts as uint16.

    The validation text holds a quarter of a million tokens; the last articles of the training text
    (they are shuffled) fill it up to `VALID_TOKENS`, and nothing is trained on those.
    """
    from tokenizers import ByteLevelBPETokenizer

    train, valid = articles(options.data, "train"), articles(options.data, "valid")
    # More than will be missing; what is left over of it goes back to training.
    kept = int(len(train) * 0.92)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        train[:kept], vocab_size=options.vocabulary, special_tokens=["[MASK]"], show_progress=False
    )

    def encoded(texts: list[str]) -> list[np.ndarray]:
        found = tokenizer.encode_batch([f"{text}\n\n" for text in texts])
        return [np.array(one.ids, dtype=np.uint16) for one in found]

    held_out, spare = encoded(valid), encoded(train[kept:])
    while sum(map(len, held_out)) < VALID_TOKENS and spare:
        held_out.append(spare.pop())
    pieces = encoded(train[:kept])
    kept_tokens = sum(map(len, pieces))
    parts = {"train": pieces + spare, "valid": held_out}
    options.out.mkdir(parents=True, exist_ok=True)
    for part, pieces in parts.items():
        np.save(options.out / f"{part}.npy", np.concatenate(pieces))
    tokenizer.save_model(str(options.out))
    about = {
        "vocabulary": tokenizer.get_vocab_size(),
        "tokens": {part: sum(map(len, pieces)) for part, pieces in parts.items()},
        "articles": {part: len(pieces) for part, pieces in parts.items()},
        "train_bytes_per_token": len("".join(train[:kept]).encode()) / kept_tokens,
    }
    write_atomically(options.out / "about.json", compact_json(about))
    print(compact_json(about), end="")


def load_tokens(folder: Path, part: str, device: str) -> torch.Tensor:
    return torch.from_numpy(np.load(folder / f"{part}.npy").astype(np.int64)).to(device)


def masked(windows: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Ids with masks, the masked places and what stood there.

    The same number in every sequence, so that no shape depends on the draw; a masked token is
    always the mask, never a random one.
    """
    count = round(SHARE_MASKED * windows.shape[1])
    draw = torch.rand(windows.shape, generator=generator, device=generator.device)
    places = draw.topk(count, dim=1).indices.to(windows.device)
    return windows.scatter(1, places, MASK), places, windows.gather(1, places)


def training_batches(cell: Cell, tokens: torch.Tensor):
    """Windows from anywhere in the text, without end; only the seed decides which."""
    generator = torch.Generator(tokens.device).manual_seed(cell.seed)
    length = cell.sizes.length
    reach = torch.arange(length, device=tokens.device)
    shape = (cell.batch_tokens // length, 1)
    while True:
        starts = torch.randint(
            len(tokens) - length, shape, generator=generator, device=tokens.device
        )
        yield masked(tokens[starts + reach], generator)


def validation_batches(cell: Cell, tokens: torch.Tensor):
    """The same windows and masks for every variant and seed; batches as large as in training."""
    generator = torch.Generator().manual_seed(0)
    shape = (cell.batch_tokens // cell.sizes.length, cell.sizes.length)
    size = shape[0] * shape[1]
    for place in range(0, min(len(tokens), cell.valid_tokens) // size * size, size):
        yield masked(tokens[place : place + size].view(shape), generator)


# Training


def optimizer_of(model: Encoder, cell: Cell, device: str) -> torch.optim.Optimizer:
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


def rate_at(step: int, cell: Cell) -> float:
    """Share of the full rate: up in a line, down to a tenth in half a cosine."""
    rise = max(int(cell.warm_up * cell.steps), 1)
    if step < rise:
        return (step + 1) / rise
    done = (step - rise) / max(cell.steps - rise, 1)
    return 0.55 + 0.45 * math.cos(math.pi * done)


def validate(model: Encoder, cell: Cell, tokens: torch.Tensor) -> float:
    # Random keys are drawn here too.
    torch.manual_seed(0)
    # Not under no_grad: what was compiled for training serves here too.
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=cell.bf16):
        losses = [model(*batch).detach() for batch in validation_batches(cell, tokens)]
    return torch.stack(losses).mean().item()


def train(cell: Cell, folder: Path, device: str) -> dict:
    """Train one cell and measure it."""
    begun = time.perf_counter()
    torch.manual_seed(cell.seed)
    variant = Variant.parse(cell.variant)
    model = Encoder(cell.sizes, variant, cell.compiled).to(device)
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


def is_finished(cell: Cell, folder: Path) -> bool:
    """Whether its result is there; another training under the same name is an error."""
    path = folder / cell.file_name
    if not path.exists():
        return False
    stored = json.loads(path.read_text("utf-8"))["config"]
    # How it is computed may differ, what is computed may not.
    for config in (stored, own := asdict(cell)):
        config.pop("compiled")
        config["sizes"].pop("core")
    if stored != own:
        raise SystemExit(f"{path} holds another training; name another --out")
    return True


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Seed by seed, so that time that runs out leaves whole comparisons."""
    about = json.loads((options.tokens_folder / "about.json").read_text("utf-8"))
    heads = options.heads or max(options.width // 64, 1)
    sizes = Sizes(
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
    first = Cell("diag", 0, sizes, **shared, bf16=options.bf16, compiled=options.compile)
    return [
        replace(first, variant=variant, seed=seed)
        for seed in options.seeds
        for variant in options.variant
    ]


def run(options: argparse.Namespace) -> None:
    torch.set_float32_matmul_precision("high")
    # One code object serves all kinds, in training and in validation.
    torch._dynamo.config.recompile_limit = 64
    command = " ".join(["python -m experiments.keys_training", *sys.argv[1:]])
    for cell in cells_of(options):
        if is_finished(cell, options.out):
            continue
        if options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        result = train(cell, options.tokens_folder, options.device)
        result |= {"config": asdict(cell), "setup": describe(options.device, command)}
        write_atomically(options.out / cell.file_name, compact_json(result))
        print(f"{cell.variant} seed {cell.seed}: validation {result['valid_loss']:.4f}", flush=True)


def arguments_for(cell: Cell, options: argparse.Namespace) -> list[str]:
    """The command that runs one cell of these options."""
    words = [sys.executable, "-m", "experiments.keys_training", "run"]
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
    parser.add_argument("--steps", type=int, default=Cell.steps)
    parser.add_argument("--batch-tokens", type=int, default=Cell.batch_tokens)
    parser.add_argument("--valid-tokens", type=int, default=Cell.valid_tokens)
    parser.add_argument("--rate", type=float, default=Cell.rate)
    parser.add_argument("--warm-up", type=float, default=Cell.warm_up, help="share of the steps")
    parser.add_argument("--decay", type=float, default=Cell.decay)
    for name in ("length", "layers", "width", "block", "keys"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Sizes, name))
    parser.add_argument("--heads", type=int, help="default: of 64 features each")
    parser.add_argument("--slot-shift", type=float, default=Sizes.slot_shift)
    parser.add_argument("--core", choices=["dense", "sdpa"], default=Sizes.core)
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
