"""The laboratory's commands of ``lln``: demo, inspect, figure and fit; others lie beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_TEXT = (
    "A text file, or a folder of text files, to train on. Default: the source code of Python's "
    "standard library."
)
Device = Annotated[str, typer.Option(help="cpu or cuda.")]


def demo(
    out: Annotated[
        Path,
        typer.Option(help="Where to write the page. Its numbers go into a JSON file next to it."),
    ] = Path("lln-demo.html"),
    data: Annotated[Path | None, typer.Option(help=_TEXT)] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Rough time for the whole demo. Default: 110, or 10 with --quick."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A short version, under half a minute.")
    ] = False,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page when done.")] = False,
) -> None:
    """Show what LLN attention is: one self-contained HTML page with measured plots.

    Three parts: how concentrated softmax, LLN and plain kernels are; the time of LLN and softmax
    at growing sequence lengths, with the crossover marked; a small encoder trained on real text
    with softmax, LLN, block-diagonal, LLN + block-diagonal attention and exact keys.

    Ctrl-C leaves a valid page with what has been measured so far.
    """
    from lln_lab.demo import run_demo

    run_demo(
        out=out, data=data, seconds=seconds, quick=quick, open_browser=open_browser, echo=typer.echo
    )


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder with a Hugging Face model, or a hub name in the local cache."
        ),
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
        int, typer.Option(help="Tokens per sequence: at least 8, better 64 or more.")
    ] = 512,
    samples: Annotated[
        int, typer.Option(help="Number of sequences; the report shows medians over them.")
    ] = 1,
    heads: Annotated[
        str | None,
        typer.Option(help="Heads to show in detail, as LAYER.HEAD,... Default: the extremes."),
    ] = None,
    pages: Annotated[
        int | None,
        typer.Option(
            help="Pages that a query would see if the model were converted; a quarter to four "
            "times as many are compared. Default: 32."
        ),
    ] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens in a page. Default: 16.")] = None,
    window: Annotated[
        int | None,
        typer.Option(
            help="Tokens that a query would see before its own, or on either side. Default: "
            "127 in a decoder, 64 in an encoder."
        ),
    ] = None,
    sinks: Annotated[
        int | None,
        typer.Option(
            help="First tokens that every query would see. Default: 16 in a decoder, none in an "
            "encoder."
        ),
    ] = None,
) -> None:
    """Measure a model's attention: one self-contained HTML report, and its numbers as JSON.

    For every layer and head: temperature, entropy, spectral gap and how log-normal the weights
    are, compared with the paper's theory; where the theory's Gaussian assumptions fail; which LLN
    attention could replace the head. Nothing is downloaded.

    Before `lln convert`: how much of softmax's attention lies in the window, on the first tokens,
    on chosen pages and elsewhere. Heads that leave much elsewhere would be changed by a conversion
    with so many pages. Take a text as long as those to come: of 512 tokens, 32 pages leave nothing
    out.

    Ctrl-C leaves a valid page with the layers measured so far.
    """
    from lln_lab.inspection import run_inspect

    options: dict[str, Any] = {"text": text, "tokens": tokens, "samples": samples, "heads": heads}
    options |= {"pages": pages, "page_size": page_size, "window": window, "sinks": sinks}
    run_inspect(model, out, **options, echo=typer.echo)


def figure(
    name: Annotated[
        str,
        typer.Argument(
            help="A figure of the paper: 1, 2, 5a, 5b, 6a, 6b or 7; or theory: its claims."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the picture (PNG and SVG).")] = Path(
        "figures"
    ),
    results: Annotated[
        Path | None,
        typer.Option(help="Folder for the numbers (JSON). Default: the folder of --out."),
    ] = None,
    device: Device = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="A coarse version, in seconds.")] = False,
    data: Annotated[Path | None, typer.Option(help=f"Figure 1: {_TEXT}")] = None,
    work: Annotated[
        Path,
        typer.Option(
            help="Figure 1: file for the training state; an interrupted run resumes from it."
        ),
    ] = Path("lln-figure-1.pt"),
) -> None:
    """Measure one analysis figure of the paper again; draw it like the paper and in our own way.

    Figure 1 trains a small RoBERTa (minutes), 2 compares attention kernels, 5a and theory test the
    paper's predictions, 5b and 7 show moment matching, 6a and 6b sums of log-normals. The numbers
    are saved with the picture.
    """
    from lln_lab.figures.command import run

    places = {"out": out, "results": results, "data": data, "work": work}
    run(name, device=device, quick=quick, echo=typer.echo, **places)


def fit(
    out: Annotated[
        Path,
        typer.Option(help="Where to write the constants. The library keeps those it came with."),
    ] = Path("constants.json"),
    figures: Annotated[
        Path | None, typer.Option(help="Folder for the paper's Figures 5b and 7 (PNG and SVG).")
    ] = None,
    device: Device = "cpu",
    seeds: Annotated[int, typer.Option(help="Independent draws per grid point.")] = 3,
    quick: Annotated[
        bool, typer.Option("--quick", help="A coarse grid, about a minute on a laptop.")
    ] = False,
    work: Annotated[
        Path,
        typer.Option(help="File for the measurements so far; an interrupted fit resumes from it."),
    ] = Path("lln-fit.jsonl"),
) -> None:
    """Fit the constants of moment matching again from scratch (appendix A.7).

    Draws Gaussian queries and keys, measures softmax and LLN attention on them, solves for the
    spread s at which both agree, and fits the curves s(p, D, N). Prints our values next to the
    published ones and checks the fit on fresh draws.
    """
    from lln_lab.figures.matched_moments import draw_figures
    from lln_lab.fitting.command import run

    run(out, figures, device, seeds, quick, work, draw=draw_figures, echo=typer.echo)
