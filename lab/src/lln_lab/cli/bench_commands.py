"""The command line's benchmarks: ``lln bench``, ``lln bench roberta``, ``lln bench peers``."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from lln.errors import InvalidInputError

_ROBERTA, _PEERS = "roberta", "peers"
_LISTS = ("--lengths", "--operations", "--passes", "--systems")


class _ListsGroup(TyperGroup):
    """Lets ``--lengths 512 1024`` and ``--lengths 512,1024`` take several values."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # pyright: ignore
        """Repeat the name of a list option before each of its values, as click requires."""
        return super().parse_args(ctx, repeat_names(args))


def repeat_names(words: list[str]) -> list[str]:
    """Words of the command line, with a list option's name before each of its values.

    Example:
        >>> repeat_names(["--lengths", "512", "1024", "--resume"])
        ['--lengths', '512', '--lengths', '1024', '--resume']
    """
    repeated: list[str] = []
    name = ""
    for word, after in zip_longest(words, words[1:], fillvalue="-"):
        option, _, values = word.partition("=")
        if option in _LISTS:
            name = option
            # Kept without a value, so that click reports what is missing.
            repeated += [name] * (not values and _ends_list(after))
        elif name and not _ends_list(word):
            values = word
        else:
            name, values = "", ""
            repeated.append(word)
        repeated += [each for value in values.split(",") if value for each in (name, value)]
    return repeated


def _ends_list(word: str) -> bool:
    return word.startswith("-") or word in (_ROBERTA, _PEERS)


bench_app = typer.Typer(
    cls=_ListsGroup,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="markdown",
)

Device = Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Keep what --out holds and measure only what is missing.")
]
Threads = Annotated[int | None, typer.Option(help="CPU threads. Default: as many as torch uses.")]
Figure = Annotated[
    bool, typer.Option("--figure", help="Draw time and memory over N, next to --out (SVG and PNG).")
]


@bench_app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    device: Device = None,
    lengths: Annotated[
        list[int] | None,
        typer.Option(metavar="N…", help="Sequence lengths, e.g. --lengths 512 4096."),
    ] = None,
    operations: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME…",
            help="Only these: sdpa sdpa_flash sdpa_cudnn lln lln_matched lln_diag lln_diag_64 "
            "lln_compiled lln_diag_compiled; diag diag_sdpa; sdpa_causal sdpa_flash_causal "
            "sdpa_cudnn_causal lln_causal lln_diag_causal fla_causal fla_causal_raw; "
            "flash_packed lln_packed; sdpa_decode lln_decode. α and β are given to all but "
            "lln_matched, which finds them as a call without them does.",
        ),
    ] = None,
    passes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PASS…", help="forward, or both (forward + backward). Default: each of the two."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, float16 or float64. Default: float32 on a CPU, bfloat16 "
            "on a GPU."
        ),
    ] = None,
    width: Annotated[int | None, typer.Option(help="Head width D. Default: 64.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Results file. Default: lln-bench-DEVICE.json here.")
    ] = None,
    resume: Resume = False,
    threads: Threads = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Time to repeat one case for. Default: 0.3 on a CPU, 0.05 on a GPU."),
    ] = None,
    figure: Figure = False,
) -> None:
    """Time LLN attention and its rivals on this machine, forward and forward + backward.

    Without options it runs the suite for the device: about three minutes on two CPU cores, ten to
    fifteen on an H200. With --lengths, --dtype or --width every operation runs with these values
    only.

    Correctness comes first: each case is compared with a float64 reference, gradients too. For a
    case over its error budget the command prints the error instead of a time. It still measures
    the others, and exits with 1.

    Columns of the table:

    - ms: median of calls from Python; ~ marks noisy times.
    - graph ms: the same, replayed as a CUDA graph: the time of the GPU alone.
    - units: the time taken / the least possible time (the floor). A unit is the time to read or
      write one tensor (B, H, N, D) at the copy speed of this machine.
    - floors: the time divided by the floor.
    - vs softmax, vs compiled, vs fla: how many times faster than the fastest softmax, than the
      eager form under torch.compile, than fla's linear attention (causal, if it is installed).
    - memory: the peak, divided by the size of the tensors that no implementation can avoid.

    The results file is complete after every case: Ctrl-C loses nothing, --resume continues.
    """
    if context.invoked_subcommand is not None:
        given = [name for name, value in context.params.items() if value]
        if given:
            raise InvalidInputError(
                f"options of `lln bench {context.invoked_subcommand}` follow its name, "
                f"got --{given[0]} before it."
            )
        return
    from lln_lab.bench.attention_bench import run_bench
    from lln_lab.bench.command import Options

    options = Options(typer.echo, device, lengths, out, resume, threads, seconds, figure)
    chosen = {"operations": operations, "passes": passes, "dtype": dtype, "width": width}
    _exit(run_bench(options, **chosen))


@bench_app.command(_ROBERTA)
def roberta(
    device: Device = None,
    lengths: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N…",
            help="Default: 512 to 16384, then longer until memory runs out.",
        ),
    ] = None,
    systems: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME…",
            help="Only these: softmax_sdpa softmax_naive nystromformer lln lln_diag diag.",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens per batch in the last part; 0 skips it. Default: as many as fill the GPU."
        ),
    ] = None,
    layers: Annotated[int, typer.Option(help="Layers of the encoder.")] = 12,
    out: Annotated[
        Path | None, typer.Option(help="Results file. Default: lln-roberta-DEVICE.json here.")
    ] = None,
    resume: Resume = False,
    seconds: Annotated[
        float | None,
        typer.Option(help="Time to repeat one cell for, at most 20 steps. Default: 1."),
    ] = None,
    figure: Figure = False,
) -> None:
    """Memory and time of one training step of RoBERTa-base: the paper's Table 2.

    Forward (bfloat16 by autocast on a GPU, float32 on a CPU), backward and AdamW of a 12-layer
    masked-language model with each attention: PyTorch's softmax, softmax that stores its N×N
    matrix, Nyströmformer, LLN, LLN + Diag, and the diagonal part alone. First with batch 1 at
    lengths that double until memory runs out; then, on a GPU, the same up to 16,384 tokens as
    CUDA graphs, which shows how much time launching from Python takes; then with batches that
    fill the GPU and have the same number of tokens at every length.

    About five minutes on an H200. A cell that does not fit says "out of memory", and the next one
    starts with free memory.

    A short try on a CPU: `lln bench roberta --device cpu --lengths 64 128 --layers 2`
    """
    from lln_lab.bench.command import Options
    from lln_lab.bench.roberta_bench import run_roberta

    options = Options(typer.echo, device, lengths, out, resume, None, seconds, figure)
    _exit(run_roberta(options, systems=systems, tokens=tokens, layers=layers))


@bench_app.command(_PEERS)
def peers(
    device: Device = None,
    lengths: Annotated[
        list[int] | None,
        typer.Option(metavar="N…", help="Default: 256 1024 4096, on a GPU also 16384 65536."),
    ] = None,
    systems: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME…",
            help="Only these of `lln peers`, or softmax_layer: softmax with its feed-forward.",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens per batch in the second part; 0 skips it. Default: 4096, on a GPU 65536."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Results file. Default: lln-peers-DEVICE.json here.")
    ] = None,
    resume: Resume = False,
    threads: Threads = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Time to repeat one cell for. Default: 0.1 on a CPU, 0.02 on a GPU."),
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(help="Seconds one call may take. Default: 5 on a CPU, 1 on a GPU."),
    ] = None,
    figure: Figure = False,
) -> None:
    """Time and memory of one layer of every attention system at several lengths.

    Forward, and forward + backward with gradients of the tokens and all weights, projections
    included, no padding: first with batch 1, then with the same number of tokens in every batch.
    On a GPU layers are 768 wide with 12 heads and weights in bfloat16; on a CPU 256 wide with 4
    heads in float32. A block (see `lln peers`) also does the work of a feed-forward: compare it
    with softmax_layer.

    A system is not measured at longer sequences once a call takes longer than --limit or runs out
    of memory; its cells say which. Memory is the allocator's peak on a GPU, and the largest total
    of the tensors alive at once on a CPU; both include weights and inputs.

    About seven minutes on two CPU cores, a few on a GPU. The results file is complete after every
    cell: Ctrl-C loses nothing, --resume continues.

    A short try: `lln bench peers --device cpu --lengths 256 1024 --systems softmax lln elu`
    """
    from lln_lab.bench.command import Options
    from lln_lab.bench.peers_bench import run_peers

    options = Options(typer.echo, device, lengths, out, resume, threads, seconds, figure)
    _exit(run_peers(options, systems=systems, tokens=tokens, limit=limit))


def _exit(right: bool) -> None:
    if not right:
        raise typer.Exit(1)
