"""The command line's change to Hugging Face checkpoints: ``lln convert``.

Options with names of their own are shared with ``lln recover``, of the laboratory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

STATISTICS = (
    "Where α and β come from: sample (each sequence itself), running (an average that training "
    "updates), fixed (the calibration), learned (trained, starting from the calibration)."
)

ATTENTION = (
    "lln_keys: one softmax over neighbours and chosen tokens, with LLN's slots for the rest or, in "
    "decoders, without; lln_diag: LLN mixed with "
    "softmax inside blocks; lln: LLN alone."
)
Target = Annotated[
    float | None,
    typer.Option(
        "--target",
        metavar="X",
        help="How close to the original the converted model has to be, from 0 to 1 (mean cosine of "
        "its output): every layer gets as few exact keys as that allows, 0 to 256, or stays "
        "softmax where 256 do not suffice. Try 0.99. The search comes with the laboratory.",
    ),
]
Layers = Annotated[
    str | None,
    typer.Option(help="Layers to convert, as 0,1,2 or by name. Default: all of them."),
]
MIX = (
    "Weight of LLN against the blocks: a number, or learned (gate: per token; ratio, scale: per "
    "channel), or heads: half of the heads use LLN, half use blocks."
)
Mix = Annotated[str, typer.Option(help=MIX)]
BlockSize = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Tokens in a diagonal block. Default: the head width, 64 for lln_keys.",
        min=1,
    ),
]
Keys = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Of lln_keys: keys outside its block that a query sees exactly. Default: 64.",
        min=0,
    ),
]
Pages = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Of lln_keys: pages that a query sees beside its window and the first tokens, in "
        "place of block, keys and slots; 0 = those. Default: 32 for decoders and encoders with "
        "rotary positions, else 0.",
        min=0,
    ),
]
GroupSize = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Of lln_keys: queries that share their keys, a divisor of the block size. 16 choose "
        "better than a block and cost more. Default: a block.",
        min=1,
    ),
]
Convolution = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Add a depthwise convolution of the values over N tokens, an odd number, to every "
        "converted layer of an encoder. It starts at zero: training makes it useful. 0 = none.",
        min=0,
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace NEW_FOLDER.")]


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A Hugging Face checkpoint, left as it is.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="NEW_FOLDER", help="Where to write the converted one.")
    ],
    attention: Annotated[str, typer.Option(help=ATTENTION)] = "lln_keys",
    layers: Layers = None,
    target_quality: Target = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Text for finding α and β (LLN's temperatures) of every head; causal models need "
            "it, and --target. A file or folder, .txt[.xz]."
        ),
    ] = None,
    holdout: Annotated[
        Path | None,
        typer.Option(
            help="Text to verify --target on, not used for choosing. Default: the last quarter of "
            "the samples of --calibrate."
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Samples of that text to use, which are lines joined until they fill --tokens; "
            "with lln and lln_diag single lines.",
            min=1,
        ),
    ] = 32,
    tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens per sample; longer samples are cut.", min=2)
    ] = 512,
    statistics: Annotated[
        str | None,
        typer.Option(help=f"{STATISTICS} Default: fixed with --calibrate, else sample."),
    ] = None,
    matching: Annotated[
        str | None,
        typer.Option(
            help="What LLN matches to softmax with sample and running statistics: variance (of the "
            "log weights), entropy, rest (half of that, for lln_keys), or paper (the paper's "
            "constants). Default: variance, rest for lln_keys."
        ),
    ] = None,
    mix: Mix = "0.5",
    block_size: BlockSize = None,
    keys: Keys = None,
    group_size: GroupSize = None,
    pages: Pages = None,
    page_size: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens in a page. Default: 16.", min=1)
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With pages: tokens that a query sees before its own, or on either side. Default: "
            "127, or 64.",
            min=0,
        ),
    ] = None,
    sinks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With pages: first tokens that every query sees. Default: 16 in a decoder, else "
            "0.",
            min=0,
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With pages and --calibrate: numbers per token that pages are chosen by. "
            "Default: half the head width.",
            min=1,
        ),
    ] = None,
    convolution: Convolution = 0,
    overwrite: Overwrite = False,
) -> None:
    """Replace a checkpoint's attention with LLN, and check by running it that every layer uses it.

    Prints which layers changed and how far their outputs moved. A converted model is less accurate
    until it is trained further: fine-tune it, or let `lln recover`, of the laboratory, convert and
    train the original.
    Nothing is downloaded.

    Try `lln convert FOLDER NEW_FOLDER --calibrate text.txt` with a few dozen lines like those the
    model will read. In Python, call `lln.integrations.transformers.register()` and load NEW_FOLDER
    with `from_pretrained`.

    To stay close to the original without training, add `--target 0.99`, and `--tokens` for the
    length you need. It prints what 0 to 256 exact keys per layer would give in quality and cost in
    time, what it chose, and what the choice gives on text it did not see; lln_target.json in
    NEW_FOLDER keeps all of it. The model runs 30 times at most.
    """
    from lln.checks.names import check_choice
    from lln.integrations.folders import convert_folder
    from lln.integrations.progress import step_bar
    from lln.integrations.settings import ATTENTIONS

    # Before the weights are loaded, which can take long.
    check_choice("attention", attention, ATTENTIONS)
    with step_bar(typer.echo) as show_step:
        convert_folder(
            source,
            target,
            attention=attention,
            layers=layers,
            calibrate=calibrate,
            target_quality=target_quality,
            holdout=holdout,
            samples=samples,
            tokens=tokens,
            statistics=statistics,
            matching=matching,
            mix=number_or_name(mix),
            block_size=block_size,
            keys=keys,
            group_size=group_size,
            pages=pages,
            page_size=page_size,
            window=window,
            sinks=sinks,
            rank=rank,
            convolution=convolution,
            overwrite=overwrite,
            echo=typer.echo,
            on_step=show_step,
        )


def number_or_name(text: str) -> float | str:
    """The value of an option that takes either."""
    try:
        return float(text)
    except ValueError:
        return text
