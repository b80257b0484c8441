"""The command line's changes to Hugging Face checkpoints: ``lln convert`` and ``lln recover``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_STATISTICS = (
    "Where α and β come from: sample (every sequence itself), running (an average that training "
    "updates), fixed (the calibration), learned (trained, from the calibration on)."
)

Attention = Annotated[
    str,
    typer.Option(help="lln_diag: LLN joined with softmax inside blocks; lln: LLN alone."),
]
Layers = Annotated[
    str | None,
    typer.Option(help="Layers to convert, as 0,1,2 or by name. Default: all of them."),
]
Mix = Annotated[
    str,
    typer.Option(
        help="Weight of LLN beside the blocks: a number, or learned (gate: per token; ratio, "
        "scale: per channel), or heads: half of the heads each."
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(metavar="N", help="Tokens in a diagonal block. Default: the head width.", min=1),
]
SlidingWindow = Annotated[
    str, typer.Option(help="Layers with a sliding window: refuse, or softmax to leave them.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace NEW_FOLDER.")]


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A Hugging Face checkpoint, left as it is.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="NEW_FOLDER", help="Where to write the converted one.")
    ],
    attention: Attention = "lln_diag",
    layers: Layers = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Text to find α and β of every head on; causal models need it. A file or folder, "
            ".txt[.xz]."
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option(metavar="N", help="Lines of that text to use.", min=1)
    ] = 32,
    tokens: Annotated[
        int, typer.Option(metavar="N", help="Longest sample, in tokens.", min=2)
    ] = 512,
    statistics: Annotated[
        str | None,
        typer.Option(help=f"{_STATISTICS} Default: fixed with --calibrate, else sample."),
    ] = None,
    matching: Annotated[
        str,
        typer.Option(
            help="What LLN is to share with softmax under sample and running statistics: variance "
            "(of the log weights), entropy, or what the paper's constants give (paper)."
        ),
    ] = "variance",
    mix: Mix = "0.5",
    block_size: BlockSize = None,
    sliding_window: SlidingWindow = "refuse",
    overwrite: Overwrite = False,
) -> None:
    """Turn a Hugging Face checkpoint linear and prove by running it that every layer is.

    Prints which layers changed and how far their outputs moved. A converted model is less accurate
    until it is trained further: fine-tune it, or let `lln recover` convert and train the original.
    Nothing is downloaded.

    Try `lln convert FOLDER NEW_FOLDER --calibrate text.txt` with a few dozen lines as the model
    will read them. In Python, call `lln.integrations.transformers.register()` and load NEW_FOLDER
    with `from_pretrained`.
    """
    from lln.integrations.folders import convert_folder

    convert_folder(
        source,
        target,
        attention=attention,
        layers=layers,
        calibrate=calibrate,
        samples=samples,
        tokens=tokens,
        statistics=statistics,
        matching=matching,
        mix=_number_or_name(mix),
        block_size=block_size,
        sliding_window=sliding_window,
        overwrite=overwrite,
        echo=typer.echo,
    )


def recover(
    source: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A checkpoint with softmax attention.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="NEW_FOLDER", help="Where to write the recovered model.")
    ],
    text: Annotated[
        Path, typer.Option(help="Text to train on, no labels: a file or folder, .txt[.xz].")
    ],
    attention: Attention = "lln_diag",
    layers: Layers = None,
    statistics: Annotated[str, typer.Option(help=_STATISTICS)] = "running",
    mix: Mix = "gate",
    block_size: BlockSize = None,
    sliding_window: SlidingWindow = "refuse",
    tokens: Annotated[
        int,
        typer.Option(metavar="N", help="Length of a sample: train at the length you need.", min=2),
    ] = 128,
    batch_size: Annotated[
        int, typer.Option(metavar="N", help="Samples per step and device.", min=1)
    ] = 16,
    layer_steps: Annotated[
        int, typer.Option(metavar="N", help="Steps on single layers.", min=0)
    ] = 500,
    end_steps: Annotated[
        int, typer.Option(metavar="N", help="Steps on the model's output.", min=0)
    ] = 500,
    layer_learning_rate: Annotated[
        float, typer.Option(metavar="X", help="Learning rate of the steps on single layers.")
    ] = 1e-3,
    end_learning_rate: Annotated[
        float, typer.Option(metavar="X", help="Learning rate of the steps on the output.")
    ] = 1e-4,
    end_loss: Annotated[
        str,
        typer.Option(
            help="What the steps on the output compare: logits, hidden (the last hidden state), "
            "embedding (its mean too), or auto: logits where there are any."
        ),
    ] = "auto",
    save_steps: Annotated[
        int, typer.Option(metavar="N", help="Steps between checkpoints.", min=1)
    ] = 100,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the order of the data.")] = 0,
    work: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints. Default: NEW_FOLDER.work.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Convert a Hugging Face checkpoint and train it to imitate its softmax original.

    First every attention layer learns its original's output, then the model learns the model's.
    Interrupt it as you like: the same command resumes. Nothing is downloaded.

    Try `lln recover FOLDER NEW_FOLDER --text text.txt`; on several GPUs,
    `torchrun --nproc-per-node 2 --no-python lln recover ...`.
    """
    from lln.cli.training_bar import training_bar
    from lln.integrations.folders import recover_folder
    from lln.studies.report.threads import faster_threads

    with faster_threads(typer.echo), training_bar(typer.echo) as show_step:
        recover_folder(
            source,
            target,
            attention=attention,
            layers=layers,
            text=text,
            tokens=tokens,
            work=work,
            overwrite=overwrite,
            echo=typer.echo,
            statistics=statistics,
            mix=_number_or_name(mix),
            block_size=block_size,
            sliding_window=sliding_window,
            training={
                "batch_size": batch_size,
                "layer_steps": layer_steps,
                "end_steps": end_steps,
                "layer_learning_rate": layer_learning_rate,
                "end_learning_rate": end_learning_rate,
                "end_loss": end_loss,
                "save_steps": save_steps,
                "seed": seed,
                "on_step": show_step,
            },
        )


def _number_or_name(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
