"""What ``lln recover`` does with checkpoint folders: convert, train, save.

Nothing here reaches the network: a folder that is not there is an error, not a download.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lln.files import check_apart, check_folder, new_folder
from lln.integrations.folders import (
    KEPT,
    Pieces,
    check_places,
    check_runs,
    convert_quietly,
    divided,
    parse_layers,
    save_converted,
)
from lln.integrations.loading import load_model
from lln.integrations.surgeon import has_rotations
from lln_lab.recovery.recover import recover
from lln_lab.recovery.work_folder import check_unlocked
from lln_lab.texts import read_lines


def recover_folder(
    source: Path,
    target: Path,
    *,
    attention: str,
    layers: str | None,
    text: Path,
    target_quality: float | None = None,
    tokens: int,
    work: Path | None,
    overwrite: bool,
    echo: Callable[[str], None],
    training: dict[str, Any],
    **options: Any,
) -> None:
    """``lln recover``: load, convert, train to imitate the original, save.

    Args:
        source: A checkpoint folder with softmax attention.
        target: Where to write the recovered model.
        attention: ``"lln"``, ``"lln_diag"`` or ``"lln_keys"``; None = as `convert` chooses.
        layers: Numbers or names, separated by commas; None = all.
        text: To train on.
        target_quality: ``target`` of `convert`: how good the model is to be before training.
        tokens: Length of a training sample.
        work: For checkpoints; None = beside ``target``.
        overwrite: Whether ``target`` may exist.
        echo: Prints a line.
        training: As in `lln_lab.recovery.recover.recover`.
        **options: As in `lln.integrations.convert.convert`.
    """
    check_places(source, target, overwrite)
    if work is None:
        # ``.`` and ``..`` have no name to lengthen.
        named = target if target.name.strip(".") else target.resolve()
        work = named.with_name(f"{named.name}.work")
    # Of several processes that torchrun starts, one speaks and writes.
    speaks = int(os.environ.get("RANK", "0")) == 0
    say = echo if speaks else (lambda line: None)
    check_apart(source, work, "--work", KEPT)
    check_apart(work, target, "NEW_FOLDER", "holds the checkpoints")
    check_folder(work, "--work")
    check_unlocked(work)
    lines = read_lines(text, "--text")
    model = load_model(source)
    pieces = Pieces(source, lines, tokens)
    calibration, held = pieces.batch(0, 16), None
    if target_quality is not None:
        calibration, held = divided(pieces, 24)
    check_runs(source, model, calibration)
    is_paged = attention == "lln_keys" and target_quality is None and options.get("pages") != 0
    if options.get("statistics") is None and not (
        is_paged and (options.get("pages") or has_rotations(model))
    ):
        options["statistics"] = "running"
    conversion = convert_quietly(
        model,
        attention,
        layers=parse_layers(layers),
        calibrate=calibration,
        target=target_quality,
        holdout=held,
        **options,
    )

    def tell(checkpoint: Path | None) -> None:
        say(conversion.render(shutil.get_terminal_size((100, 24)).columns))
        samples = f"{len(pieces)} sample{'s' * (len(pieces) != 1)} of {tokens} tokens at most"
        begin = "where it resumes" if checkpoint is None else f"going on from {checkpoint}"
        say(f"{samples}; checkpoints in {work}, {begin}.")

    report = recover(model, pieces, output_dir=work, probe=calibration, on_start=tell, **training)
    if speaks:
        with new_folder(target, overwrite, "NEW_FOLDER") as folder:
            save_converted(model, conversion, source, folder)
    after = report.before if report.after is None else report.after
    say(
        f"output differs from softmax by {report.before:.1%} after conversion, {after:.1%} after "
        f"recovery; wrote {target}."
    )
