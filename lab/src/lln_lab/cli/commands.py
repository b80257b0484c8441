"""Where the commands of the laboratory stand in ``lln``."""

from __future__ import annotations

import typer

from lln.cli.app import MODELS, START
from lln_lab.cli.bench_commands import bench_app
from lln_lab.cli.peer_commands import peers
from lln_lab.cli.recover_command import recover
from lln_lab.cli.study_commands import demo, figure, fit, inspect

MEASURE = "Measure and compare"


def add_to(app: typer.Typer) -> None:
    """Add every command of the laboratory; ``lln`` finds this function by its entry point."""
    app.command(rich_help_panel=START)(demo)
    for command in (recover, inspect):
        app.command(rich_help_panel=MODELS)(command)
    for command in (peers, figure, fit):
        app.command(rich_help_panel=MEASURE)(command)
    app.add_typer(bench_app, name="bench", rich_help_panel=MEASURE)
    app.info.epilog = (
        "First time here? `lln demo` makes a page with plots in two minutes, `lln bench` says how "
        "fast this machine is, and `lln inspect` measures the attention of your own model."
    )
