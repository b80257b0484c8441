"""``lln recover``: convert a checkpoint and train it to imitate its original."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lln.cli.model_commands import (
    ATTENTION,
    MIX,
    STATISTICS,
    BlockSize,
    Convolution,
    GroupSize,
    Keys,
    Layers,
    Overwrite,
    Pages,
    Target,
    number_or_name,
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
    attention: Annotated[
        str | None,
        typer.Option(help=f"{ATTENTION} Default: lln_keys with --target, else lln_diag."),
    ] = None,
    layers: Layers = None,
    target_quality: Target = None,
    statistics: Annotated[
        str | None,
        typer.Option(help=f"{STATISTICS} Default: running; attention with pages has none."),
    ] = None,
    mix: Annotated[
        str | None, typer.Option(help=f"{MIX} Default: gate; lln_keys has no such weight.")
    ] = None,
    block_size: BlockSize = None,
    keys: Keys = None,
    group_size: GroupSize = None,
    pages: Pages = None,
    convolution: Convolution = 0,
    tokens: Annotated[
        int,
        typer.Option(metavar="N", help="Length of a sample: train at the length you need.", min=2),
    ] = 128,
    batch_size: Annotated[
        int, typer.Option(metavar="N", help="Samples per step and device.", min=1)
    ] = 16,
    layer_steps: Annotated[
        int,
        typer.Option(metavar="N", help="Steps that train each attention layer by itself.", min=0),
    ] = 500,
    end_steps: Annotated[
        int, typer.Option(metavar="N", help="Steps that train on the model's output.", min=0)
    ] = 500,
    layer_learning_rate: Annotated[
        float, typer.Option(metavar="X", help="Learning rate of --layer-steps.")
    ] = 1e-3,
    end_learning_rate: Annotated[
        float, typer.Option(metavar="X", help="Learning rate of --end-steps.")
    ] = 1e-4,
    end_loss: Annotated[
        str,
        typer.Option(
            help="What --end-steps compare: logits, hidden (the last hidden state), embedding (its "
            "mean too), or auto: logits if there are any."
        ),
    ] = "auto",
    save_steps: Annotated[
        int, typer.Option(metavar="N", help="Steps between checkpoints.", min=1)
    ] = 100,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed for the order of the data.")] = 0,
    work: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints. Default: NEW_FOLDER.work.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Convert a Hugging Face checkpoint and train it to imitate its softmax original.

    First every attention layer learns the output of its softmax original, then the whole model
    learns the original model's output. You can interrupt it: the same command resumes. Nothing is
    downloaded.

    Try `lln recover FOLDER NEW_FOLDER --text text.txt`; on several GPUs,
    `torchrun --nproc-per-node 2 --no-python lln recover ...`.
    """
    from lln.checks.names import check_choice
    from lln.integrations.progress import step_bar
    from lln.integrations.settings import ATTENTIONS
    from lln_lab.recovery.recovered_folder import recover_folder
    from lln_lab.threads import faster_threads

    if attention is None:
        attention = "lln_diag" if target_quality is None else "lln_keys"
    check_choice("attention", attention, ATTENTIONS)
    if mix is None:
        mix = "0.5" if attention == "lln_keys" else "gate"
    with faster_threads(typer.echo), step_bar(typer.echo) as show_step:
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
            target_quality=target_quality,
            statistics=statistics,
            mix=number_or_name(mix),
            block_size=block_size,
            keys=keys,
            group_size=group_size,
            pages=pages,
            convolution=convolution,
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
