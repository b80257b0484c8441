"""The benchmarks without typer: ``python -m lln.studies.bench [roberta | peers] --help``.

Needs torch alone (and triton on a GPU), for machines where typer and rich are not installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lln.errors import LLNError
from lln.studies.bench.command import run_bench
from lln.studies.bench.many_values import join_lists, split_names, split_numbers
from lln.studies.bench.peers_run import run_peers
from lln.studies.bench.roberta_table import run_roberta


def main(words: Sequence[str] | None = None) -> None:
    """Parse the options and run; exits like ``lln bench``."""
    given = list(sys.argv[1:] if words is None else words)
    commands = {"roberta": _roberta, "peers": _peers}
    try:
        command = commands.get(given[0]) if given else None
        right = command(given[1:]) if command else _bench(given)
    except LLNError as error:
        sys.stderr.write(f"lln: {error}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(0 if right else 1)


def _bench(words: Sequence[str]) -> bool:
    parser = argparse.ArgumentParser(
        prog="python -m lln.studies.bench",
        description="Time attention on this machine; `… roberta` times a model, `… peers` every "
        "attention system.",
    )
    _add_shared(parser)
    parser.add_argument("--lengths", metavar="N…", help="sequence lengths")
    parser.add_argument("--operations", metavar="NAME…", help="only these")
    parser.add_argument("--passes", metavar="PASS…", help="forward, both")
    parser.add_argument("--dtype", help="float32, bfloat16, float16 or float64")
    parser.add_argument("--width", type=int, help="head width")
    parser.add_argument("--threads", type=int, help="CPU threads")
    given = vars(parser.parse_args(join_lists(words)))
    given["lengths"] = split_numbers("--lengths", given["lengths"])
    for name in ("operations", "passes"):
        given[name] = split_names(given[name])
    return run_bench(**given, echo=_echo)


def _roberta(words: Sequence[str]) -> bool:
    parser = argparse.ArgumentParser(
        prog="python -m lln.studies.bench roberta",
        description="Time and memory of one training step of RoBERTa-base (the paper's Table 2).",
    )
    _add_shared(parser)
    parser.add_argument("--lengths", metavar="N…", help="sequence lengths")
    parser.add_argument("--systems", metavar="NAME…", help="only these attentions")
    parser.add_argument("--tokens", type=int, help="tokens in the batch that fills the device")
    parser.add_argument("--layers", type=int, default=12, help="layers of the encoder")
    given = vars(parser.parse_args(join_lists(words)))
    given["lengths"] = split_numbers("--lengths", given["lengths"])
    given["systems"] = split_names(given["systems"])
    return run_roberta(**given, echo=_echo)


def _peers(words: Sequence[str]) -> bool:
    parser = argparse.ArgumentParser(
        prog="python -m lln.studies.bench peers",
        description="Time and memory of one layer of every attention system over the length.",
    )
    _add_shared(parser)
    parser.add_argument("--lengths", metavar="N…", help="sequence lengths")
    parser.add_argument("--systems", metavar="NAME…", help="only these")
    parser.add_argument("--tokens", type=int, help="tokens in a batch of the second part, 0: none")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--limit", type=float, help="seconds one call may take")
    given = vars(parser.parse_args(join_lists(words)))
    given["lengths"] = split_numbers("--lengths", given["lengths"])
    given["systems"] = split_names(given["systems"])
    return run_peers(**given, echo=_echo)


def _add_shared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu or cuda; default: the GPU if there is one")
    parser.add_argument("--out", type=Path, help="results file")
    parser.add_argument("--resume", action="store_true", help="keep what --out already holds")
    parser.add_argument("--seconds", type=float, help="repetition of one measurement")
    parser.add_argument("--figure", action="store_true", help="draw the results beside --out")


def _echo(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
