"""The command line: ``lln demo | inspect | figure | bench | peers | convert | recover | …``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lln.cli.bench_commands import bench_app
from lln.cli.model_commands import convert, recover
from lln.cli.peer_commands import peers
from lln.errors import LLNError

_TEXT = (
    "A text file, or a folder of them, to train on. Default: the source of Python's standard "
    "library."
)
START, MODELS, MEASURE = "Start here", "Your Hugging Face model", "Measure and compare"
Device = Annotated[str, typer.Option(help="cpu or cuda.")]

app = typer.Typer(
    name="lln",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Paragraphs of the help are wrapped to the terminal's width, not as in the source.
    rich_markup_mode="markdown",
    help=(
        "Linear Log-Normal attention: softmax's concentration at linear cost.\n\n"
        "Start with `lln demo` (a page with plots, two minutes); `lln doctor` says what this "
        "machine can run, `lln bench` how fast. With a model of your own: `lln inspect` looks into "
        "its attention, `lln recover` makes it linear and trains it back."
    ),
)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        from lln import __version__

        typer.echo(f"lln {__version__}")
        raise typer.Exit


@app.command(rich_help_panel=START)
def demo(
    out: Annotated[
        Path, typer.Option(help="Where to write the page; its numbers go beside it as JSON.")
    ] = Path("lln-demo.html"),
    data: Annotated[Path | None, typer.Option(help=_TEXT)] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Rough time for the whole demo. Default: about two minutes."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A short look, under half a minute.")
    ] = False,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page when done.")] = False,
) -> None:
    """Show what LLN attention is: one self-contained HTML page with measured plots.

    Three parts: how concentrated softmax, LLN and plain kernels are; how long LLN and softmax take
    over the length of the sequence, with the crossover marked; a small encoder trained on real
    text with softmax, LLN, block-diagonal and LLN + block-diagonal attention.

    Ctrl-C leaves a valid page with what has been measured so far.
    """
    from lln.studies.demo import run_demo

    run_demo(
        out=out, data=data, seconds=seconds, quick=quick, open_browser=open_browser, echo=typer.echo
    )


@app.command(rich_help_panel=START)
def doctor() -> None:
    """Say what this machine can run and how busy it is, and prove it on a small example.

    Exits with 1 if attention gives a wrong number here.
    """
    from lln.studies.doctor import examine

    if not examine(typer.echo):
        raise typer.Exit(1)


@app.command(rich_help_panel=MODELS)
def inspect(
    model: Annotated[
        str, typer.Argument(help="A folder with a Hugging Face model, or a hub name in the cache.")
    ],
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text to run it on. Default: documentation of Python's standard library."
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for lln-inspect.html and lln-inspect.json.")
    ] = Path("."),
    tokens: Annotated[
        int, typer.Option(help="Length of a sequence; 8 at least, 64 or more are better.")
    ] = 512,
    samples: Annotated[int, typer.Option(help="Sequences; values are medians over them.")] = 1,
    heads: Annotated[
        str | None,
        typer.Option(help="Heads to show in detail, as LAYER.HEAD,... Default: the extremes."),
    ] = None,
) -> None:
    """Look into a model's attention: one self-contained HTML report, and its numbers as JSON.

    For every layer and head: temperature, entropy, spectral gap, how log-normal the weights are,
    measured against the paper's theory; where its Gaussian assumptions break; the LLN attention
    that could stand in for the head. Nothing is downloaded.

    Ctrl-C leaves a valid page with the layers measured so far.
    """
    from lln.studies.inspection import run_inspect

    run_inspect(model, out, text=text, tokens=tokens, samples=samples, heads=heads, echo=typer.echo)


app.command(rich_help_panel=MODELS)(convert)
app.command(rich_help_panel=MODELS)(recover)
app.command(rich_help_panel=MEASURE)(peers)


@app.command(rich_help_panel=MEASURE)
def figure(
    name: Annotated[
        str, typer.Argument(help="1, 2, 5a, 5b, 6a, 6b or 7 of the paper; theory: its claims.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the picture (PNG and SVG).")] = Path(
        "figures"
    ),
    results: Annotated[
        Path | None, typer.Option(help="Folder for the numbers (JSON). Default: beside it.")
    ] = None,
    device: Device = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="A coarse version, in seconds.")] = False,
    data: Annotated[Path | None, typer.Option(help=f"Figure 1: {_TEXT}")] = None,
    work: Annotated[
        Path, typer.Option(help="Figure 1: training so far; an interrupted one goes on from here.")
    ] = Path("lln-figure-1.pt"),
) -> None:
    """Measure one analysis figure of the paper anew, and draw it as the paper does and as we would.

    Figure 1 trains a small RoBERTa (minutes), 2 compares attention kernels, 5a and theory test the
    paper's predictions, 5b and 7 show moment matching, 6a and 6b sums of log-normals. The numbers
    are kept beside the picture.
    """
    from lln.studies.figures.command import run

    places = {"out": out, "results": results, "data": data, "work": work}
    run(name, device=device, quick=quick, echo=typer.echo, **places)


@app.command(rich_help_panel=MEASURE)
def fit(
    out: Annotated[
        Path, typer.Option(help="Where to write the constants the library loads.")
    ] = Path("constants.json"),
    figures: Annotated[
        Path | None, typer.Option(help="Folder for the paper's Figures 5b and 7 (PNG and SVG).")
    ] = None,
    device: Device = "cpu",
    seeds: Annotated[int, typer.Option(help="Independent draws at every point of the grid.")] = 3,
    quick: Annotated[
        bool, typer.Option("--quick", help="A coarse grid, about a minute on a laptop.")
    ] = False,
    work: Annotated[
        Path, typer.Option(help="Measurements so far; an interrupted fit goes on from here.")
    ] = Path("lln-fit.jsonl"),
) -> None:
    """Fit the constants of moment matching again from scratch (appendix A.7).

    Draws Gaussian queries and keys, measures softmax and LLN attention on them, solves for the
    spread s at which both agree, and fits the curves s(p, D, N). Prints our values beside the
    published ones and checks the fit on fresh draws.
    """
    from lln.studies.fitting.command import run

    run(out, figures, device, seeds, quick, work, echo=typer.echo)


app.add_typer(bench_app, name="bench", rich_help_panel=MEASURE)


def main() -> None:
    """Run the command line; errors raised on purpose are one sentence, not a traceback."""
    try:
        app()
    except LLNError as error:
        typer.secho(f"lln: {error}", fg=typer.colors.RED, err=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
